"""What stands of chains and trees: hand tables, padding, and the output
distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_test import distribution_of
from scipy import stats

from swiftspec_jax.config import SamplingParams
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step import slot_trees, verify
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.sampling import SamplingLevel
from swiftspec_jax.step.slot_sampling import level_of
from swiftspec_jax.step.verdicts import Verdicts
from swiftspec_jax.tree import types

VOCAB = 5
START = 10  # tokens known before the root and its draft
END = types.PLACEHOLDER_TOKEN_ID
MESH = sharding.make_mesh(jax.devices()[:1])


def verdicts_of(
  choices, drafted, num_drafted, trees=None, *, in_order=False, state=None
):
  """Verdicts of slots with some choices, or logits [B, T, V], after each node.

  Args:
    choices: i32[B, T] or f32[B, T, V].
    drafted: i32[B, K].
    num_drafted: i32[B].
    trees: of `slot_trees.of_proposal`.
    in_order: whether the queries are those of the slots, one after the other.
    state: sampling parameters of the slots; greedy by default.
  """
  logits = np.asarray(choices, np.float32)
  if logits.ndim == 2:
    logits = np.eye(VOCAB, dtype=np.float32)[np.asarray(choices)] * 3
  num_slots, size = logits.shape[:2]
  order = np.arange(num_slots * size)
  if not in_order:  # any order will do
    order = np.random.default_rng(0).permutation(order)
  index = np.argsort(order).reshape(num_slots, size)
  slots, nodes = order // size, order % size
  depths = nodes if trees is None else np.asarray(trees.depths)[slots, nodes]
  noise = None
  positions = START + 1 + depths[:, None].astype(np.int32)
  if state is None:
    state = sampling_lib.make_state(
      [SamplingParams()] * num_slots, VOCAB, SamplingLevel.GREEDY
    )
  else:
    noise = verify.make_noise(
      state.seeds, slots, jnp.asarray(positions), vocab_size=VOCAB
    )
  rows, packed, _ = verify.verify(
    jnp.asarray(logits.reshape(-1, VOCAB)[order]),
    noise,
    jnp.zeros(len(order), jnp.int32),
    verify.Queries(
      slots=jnp.asarray(slots),
      positions=jnp.asarray(positions),
      index=jnp.asarray(index),
      num_drafted=jnp.asarray(num_drafted, jnp.int32),
      is_sampled=jnp.ones(num_slots, bool),
      is_in_order=in_order,
    ),
    jnp.asarray(drafted, jnp.int32),
    state,
    Rows(
      token_ids=jnp.full((num_slots, START + size), END),
      lengths=jnp.full(num_slots, START),
      prompt_lengths=jnp.full(num_slots, START),
      max_lengths=jnp.full(num_slots, START + size),
    ),
    trees,
    reads_texts=False,
    kernels='reference',
    sharding=sharding.replicated(MESH),
  )
  verdicts = Verdicts.unpack(np.asarray(packed), size)
  ends = START + verdicts.num_accepted + 1
  assert rows.lengths.tolist() == ends.tolist()
  outputs = [
    row[START:end] for row, end in zip(rows.token_ids, ends, strict=True)
  ]
  return verdicts, [output.tolist() for output in outputs]


CHAINS = {
  # name: (drafts, number that count, target's best tokens, output)
  'all_accepted': ([1, 2, 3], 3, [1, 2, 3, 4], [1, 2, 3, 4]),
  'early_mismatch': ([0, 2, 3], 3, [1, 2, 3, 4], [1]),
  'late_mismatch': ([1, 2, 0], 3, [1, 2, 3, 4], [1, 2, 3]),
  'match_after_mismatch': ([0, 2, 3], 3, [4, 2, 3, 1], [4]),
  'nothing_drafted': ([1, 2, 3], 0, [1, 2, 3, 4], [1]),
  'padded_drafts': ([1, 2, 3], 2, [1, 2, 3, 4], [1, 2, 3]),
}


def test_chains():
  drafts, num_drafted, choices, wanted = zip(*CHAINS.values(), strict=True)
  _, outputs = verdicts_of(choices, drafts, num_drafted)
  assert outputs == list(wanted)


def test_no_drafts_at_all_is_plain_decoding():
  _, outputs = verdicts_of([[3], [1]], np.zeros((2, 0)), [0, 0])
  assert outputs == [[3], [1]]


# root ─ 1 ─ 3 ─ 0
#      ├ 2 ─ 4
#      └ 0
TOKENS = [1, 2, 3, 0, 4, 0]
PARENTS = [-1, 0, 0, 1, 0, 2, 3]


def trees_of(num_slots, num_padding):
  """Draft tokens and trees of slots that all have the tree above."""
  token_ids = np.array([TOKENS + [END] * num_padding] * num_slots, np.int32)
  parents = np.array([PARENTS + [-1] * num_padding] * num_slots, np.int32)
  packed = slot_trees.on_host(token_ids, parents)
  assert packed.shape == (num_slots, 5 * parents.shape[1] + 3)
  return slot_trees.of_proposal(packed)


TREES = {
  # name: (choice after each node, output, path)
  'nothing': ([4, 0, 0, 0, 0, 0, 0], [4], [0]),
  'one': ([0, 3, 0, 0, 2, 0, 0], [0, 2], [0, 4]),
  'deepest': ([1, 3, 0, 0, 0, 0, 2], [1, 3, 0, 2], [0, 1, 3, 6]),
  'side': ([2, 3, 4, 0, 0, 1, 0], [2, 4, 1], [0, 2, 5]),
  'match_below_mismatch': ([4, 3, 4, 0, 0, 0, 0], [4], [0]),
}


@pytest.mark.parametrize('num_padding', [0, 3])
@pytest.mark.parametrize('in_order', [False, True])
def test_trees(num_padding, in_order):
  choices, wanted, paths = zip(*TREES.values(), strict=True)
  choices = np.pad(choices, ((0, 0), (0, num_padding)))
  drafted, trees = trees_of(len(choices), num_padding)
  # Padding is none of the nodes, however many were asked for.
  num_drafted = [len(TOKENS) + num_padding] * len(choices)
  verdicts, outputs = verdicts_of(
    choices, drafted, num_drafted, trees, in_order=in_order
  )
  assert outputs == list(wanted)
  for path, found in zip(paths, verdicts.tree.path, strict=True):
    assert found[: len(path)].tolist() == path


def assert_drawn(token_ids, probs):
  """Chance fails once in 10^5."""
  counts = np.bincount(token_ids, minlength=VOCAB)
  assert counts[probs == 0].sum() == 0
  expected = probs[probs > 0] / probs.sum() * len(token_ids)
  assert stats.chisquare(counts[probs > 0], expected).pvalue > 1e-5


@pytest.mark.parametrize(
  ('params', 'num_padding'),
  [
    (SamplingParams(temperature=1.0), 0),
    (SamplingParams(temperature=0.7, top_k=3), 2),
  ],
  ids=['plain', 'top_k'],
)
def test_output_follows_the_target_distribution(params, num_padding):
  """Over many seeds: the joint distribution of the first two output tokens."""
  num_slots = 15_000
  drafted, trees = trees_of(num_slots, num_padding)
  num_nodes = 1 + drafted.shape[1]
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(num_nodes, VOCAB)).astype(np.float32)
  state = sampling_lib.make_state([params], VOCAB, level_of(params))
  rows = jax.tree.map(lambda x: np.repeat(x, num_slots, axis=0), state)
  _, outputs = verdicts_of(
    np.broadcast_to(logits, (num_slots, num_nodes, VOCAB)),
    drafted,
    [len(TOKENS)] * num_slots,
    trees,
    state=rows.replace(seeds=np.arange(num_slots, dtype=np.uint32)),
  )
  wanted = np.asarray(distribution_of(logits[None], state)[0], np.float64)
  first = np.array([output[0] for output in outputs])
  assert_drawn(first, wanted[0])
  for node in (1, 2, 4):  # children of the root
    token_id = TOKENS[node - 1]
    after = np.array([x[1] for x in outputs if x[0] == token_id], int)
    if len(after):
      assert_drawn(after, wanted[node])
