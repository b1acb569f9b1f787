"""One test body for all implementations of the verification of a tree.

The kernels run in their interpreters; they must decide as the reference does,
bit for bit. The reference is checked against hand tables and the distribution
in verify_test.py.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreters import implementations

from kernels_pallas.verification import pallas_gpu, pallas_tpu
from swiftspec_jax import tree as tree_lib

pytestmark = pytest.mark.usefixtures('no_races')

NUM_NODES = 7
VOCAB = 300  # neither of whole tiles of 128 nor of 32 tokens
IMPLEMENTATIONS = implementations(
  'verify_tree',
  pallas_tpu=pallas_tpu.Config(block_vocab=128),
  pallas_gpu=pallas_gpu.Config(block_vocab=32, num_programs=4),
)
COMPILED = {name: jax.jit(call) for name, call in IMPLEMENTATIONS.items()}


def tree_of(draws, size):
  """Token ids and parents; siblings have different tokens."""
  token_ids, parents, taken = [0], [-1], set()
  for draw in draws[: size - 1]:
    parent, token = draw % len(parents), draw // 7 % VOCAB
    while (parent, token) in taken:
      token = (token + 1) % VOCAB
    taken.add((parent, token))
    parents.append(parent)
    token_ids.append(token)
  padding = [-1] * (NUM_NODES - size)
  return token_ids + padding, parents + padding


def oracle(scores, token_ids, parents, size):
  """Walks from the root, child by child."""
  path, tokens = [0], [int(np.argmax(scores[0]))]
  while True:
    children = [
      node
      for node in range(1, size)
      if parents[node] == path[-1] and token_ids[node] == tokens[-1]
    ]
    if not children:
      return tokens, path
    path.append(children[0])
    tokens.append(int(np.argmax(scores[children[0]])))


def arguments(seed, sizes, tries):
  """Scores of which some choose the token of a child; with ties."""
  random = np.random.default_rng(seed)
  draws = [random.integers(0, 10**6, NUM_NODES) for _ in sizes]
  trees = [tree_of(d.tolist(), s) for d, s in zip(draws, sizes, strict=True)]
  token_ids, parents = (
    np.asarray(x, np.int32) for x in zip(*trees, strict=True)
  )
  scores = random.normal(size=(len(sizes), NUM_NODES, VOCAB)).round(1)
  for b, size in enumerate(sizes):
    for node in random.integers(1, size, tries) if size > 1 else ():
      parent = parents[b, node]
      scores[b, parent, token_ids[b, node]] = scores[b, parent].max()
  scores = np.where(random.random(scores.shape) < 0.2, -np.inf, scores)
  scores = scores.astype(np.float32)
  arrays = scores, token_ids, parents, np.asarray(sizes, np.int32)
  return (*map(jnp.asarray, arrays), tree_lib.ancestor_mask(parents))


def check(name, arrays):
  found = map(np.asarray, COMPILED[name](*arrays))
  tokens, num_accepted, path, choices = found
  scores, token_ids, parents, sizes, _ = map(np.asarray, arrays)
  for b, size in enumerate(sizes):
    want, nodes = oracle(scores[b], token_ids[b], parents[b], size)
    padding = NUM_NODES - len(want)
    assert tokens[b].tolist() == want + [-1] * padding
    assert path[b].tolist() == nodes + [0] * padding
    assert num_accepted[b] == len(nodes) - 1
  np.testing.assert_array_equal(choices, scores.argmax(axis=2))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  sizes=st.lists(st.integers(1, NUM_NODES), min_size=3, max_size=3),
  tries=st.integers(0, 20),
)
@hypothesis.settings(max_examples=15)
def test_any_tree(name, seed, sizes, tries):
  check(name, arguments(seed, sizes, tries))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_edges_of_the_vocabulary(name):
  """The first of equal scores, in the first, a middle and the last tile."""
  arrays = arguments(0, [1, 1, 1], 0)
  scores = np.full((3, NUM_NODES, VOCAB), -np.inf, np.float32)
  scores[0, 0, [299, 40]] = 3.0
  scores[1, 0, [127, 128, 299]] = 0.0
  tokens, *_ = COMPILED[name](jnp.asarray(scores), *arrays[1:])
  assert tokens[:, 0].tolist() == [40, 127, 0]  # nothing allowed: token 0
