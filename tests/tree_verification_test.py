"""Sample and match on trees: hand tables, padding, and the output
distribution."""

import jax
import numpy as np
import pytest

from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax import types
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.verification import matching
from tests.verification_test import chi_square

VOCAB = 5
END = types.PLACEHOLDER_TOKEN_ID
# root ─ 1 ─ 3 ─ 0
#      ├ 2 ─ 4
#      └ 0
TOKENS = [9, 1, 2, 3, 0, 4, 0]
PARENTS = [-1, 0, 0, 1, 0, 2, 3]
DEPTHS = [0, 1, 1, 2, 1, 2, 3]


def proposal_of(num_rows, num_padding):
  size = len(TOKENS)

  def rows(values, fill, dtype=np.int32):
    return np.tile(
      np.array([*values, *[fill] * num_padding], dtype), (num_rows, 1)
    )

  counts = np.zeros(num_rows, np.int32)
  return types.TreeProposal(
    token_ids=rows(TOKENS, END),
    parents=rows(PARENTS, -1),
    depths=rows(DEPTHS, 0),
    is_looked_up=rows([False] * size, False, bool),
    log_probs=rows([0] * size, 0, np.float32),
    size=counts + size,
    outcome=counts,
    num_forwards=counts,
  )


@jax.jit
def verify(proposal, choices):
  mask = tree_lib.ancestor_mask(proposal.parents)
  return matching.verify_tree(proposal, mask, jax.nn.one_hot(choices, VOCAB))


HAND_TABLE = {
  # name: (choice behind each node, output, path)
  'nothing': ([4, 0, 0, 0, 0, 0, 0], [4], [0]),
  'one': ([0, 3, 0, 0, 2, 0, 0], [0, 2], [0, 4]),
  'deepest': ([1, 3, 0, 0, 0, 0, 2], [1, 3, 0, 2], [0, 1, 3, 6]),
  'side': ([2, 3, 4, 0, 0, 1, 0], [2, 4, 1], [0, 2, 5]),
  'match_below_mismatch': ([4, 3, 4, 0, 0, 0, 0], [4], [0]),
}


@pytest.mark.parametrize('case', HAND_TABLE)
@pytest.mark.parametrize('num_padding', [0, 3])
def test_hand_table(case, num_padding):
  choices, output, path = HAND_TABLE[case]
  choices = np.array([choices + [0] * num_padding], np.int32)
  verdict, found = jax.device_get(verify(proposal_of(1, num_padding), choices))
  num_nodes = choices.shape[1]
  assert verdict.token_ids[0].tolist() == output + [END] * (
    num_nodes - len(output)
  )
  assert verdict.num_accepted[0] == len(output) - 1
  assert found[0].tolist() == path + [0] * (num_nodes - len(path))


def test_wire_formats_are_reversible():
  proposal = proposal_of(2, 1)
  verified = types.VerifiedTokens(
    token_ids=np.array([[3, 1, END]], np.int32),
    num_tokens=np.array([2], np.int32),
  )
  for values in (proposal, verified):
    again = jax.jit(lambda x: type(x).unpack(x.pack()))(values)
    jax.tree.map(np.testing.assert_array_equal, values, again)


# Thousands of rows take longer to run than to compile.
choose = jax.jit(
  matching.choose, compiler_options={'xla_backend_optimization_level': 3}
)


@jax.jit
def law_of(logits, state):
  return jax.nn.softmax(sampling_lib.law_logits(logits, state), axis=-1)


@pytest.mark.parametrize(
  ('params', 'num_padding'),
  [
    (SamplingParams(temperature=1.0), 0),
    (SamplingParams(temperature=0.7, top_k=3), 2),
    (SamplingParams(temperature=1.3, top_p=0.8), 0),
  ],
  ids=['plain', 'top_k', 'top_p'],
)
def test_output_follows_the_target_law(params, num_padding):
  """Over many seeds: the joint distribution of the first two output tokens."""
  num_rows = 15_000
  proposal = proposal_of(num_rows, num_padding)
  num_nodes = proposal.token_ids.shape[1]
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(num_nodes, VOCAB)).astype(np.float32)
  state = sampling_lib.make_state([params], VOCAB)
  rows = jax.tree.map(lambda x: np.repeat(x, num_rows, axis=0), state)
  choices = choose(
    np.broadcast_to(logits, (num_rows, num_nodes, VOCAB)),
    11 + proposal.depths,
    rows.replace(seeds=np.arange(num_rows, dtype=np.uint32)),
  )
  verdict, _ = verify(proposal, choices)
  law = np.asarray(law_of(logits[None], state)[0], np.float64)

  first, second = np.asarray(verdict.token_ids)[:, :2].T
  statistic, bound = chi_square(np.bincount(first, minlength=VOCAB), law[0])
  assert statistic < bound
  for node in (1, 2, 4):  # children of the root
    behind = second[first == TOKENS[node]]
    assert len(behind) == 0 or (behind != END).all()
    if len(behind):
      statistic, bound = chi_square(
        np.bincount(behind, minlength=VOCAB), law[node]
      )
      assert statistic < bound
