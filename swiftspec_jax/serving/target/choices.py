"""What the target chooses behind its queries, and what stands of the drafts.

The method is sample and match (`verification.matching`). The noise belongs to
the request's seed and the position. So a request has the same output whatever
it shares its steps with, whatever was drafted for it, and whether or not it was
preempted.

Every query is a row of its own here, so rows of different lengths need no
padding. Requests differ in what they use of `SamplingParams`; a step takes the
lowest of four compiled levels that covers its rows. A level changes nothing
for a row that does not need it.

Legend: M queries, T queries of the longest draft, K = T - 1, B slots, S tokens
of the longest text, R rows, W tokens of each, V vocabulary.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from kernels_pallas.verification import reference
from swiftspec_jax import errors, spec_step, types
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.serving.drafters.slot_trees import SlotTrees
from swiftspec_jax.serving.target.row_state import RowState
from swiftspec_jax.serving.target.verdicts import TreePart, Verdicts
from swiftspec_jax.verification import matching

_MAX_FORCED = 16


class Level(enum.IntEnum):
  """How much of `SamplingParams` a request uses."""

  GREEDY = 0
  TEMPERATURE = 1
  TRUNCATED = 2
  ADJUSTED = 3  # penalties, bias, bans, forced tokens, min_tokens, logprobs


_DRAWN = {'temperature': 1.0}
_CUT = {**_DRAWN, 'top_k': 1, 'top_p': 0.5, 'min_p': 0.5}
_ADJUSTED = {
  **_CUT,
  'repetition_penalty': 2.0,
  'presence_penalty': 1.0,
  'frequency_penalty': 1.0,
  'banned_token_ids': (0,),
  'forced_token_ids': (0,) * _MAX_FORCED,
  'min_tokens': 1,
  'logprobs': True,
  'top_logprobs': 1,
}
# A request that uses all that a level has.
_FEATURES = {
  Level.GREEDY: SamplingParams(),
  Level.TEMPERATURE: SamplingParams(**_DRAWN),
  Level.TRUNCATED: SamplingParams(**_CUT),
  Level.ADJUSTED: SamplingParams(**_ADJUSTED),
}


def level_of(params: SamplingParams) -> Level:
  """Returns the lowest level that covers a request."""
  if (
    params.repetition_penalty != 1
    or params.presence_penalty
    or params.frequency_penalty
    or params.logit_bias
    or params.banned_token_ids
    or params.forced_token_ids
    or params.min_tokens
    or params.logprobs
  ):
    return Level.ADJUSTED
  if params.temperature == 0:
    return Level.GREEDY
  if params.top_k or params.top_p < 1 or params.min_p:
    return Level.TRUNCATED
  return Level.TEMPERATURE


def check(params: SamplingParams) -> None:
  """Raises UserError for more forced tokens than there is room for."""
  if len(params.forced_token_ids) > _MAX_FORCED:
    raise errors.UserError(
      f'forced_token_ids has {len(params.forced_token_ids)} tokens, an engine '
      f'takes at most {_MAX_FORCED}'
    )


def make_state(
  batch: Sequence[SamplingParams],
  vocab_size: int,
  level: Level,
  eos_token_ids: Sequence[int] = (),
) -> sampling_lib.SamplingState:
  """Returns host arrays of all slots for a level."""
  return sampling_lib.make_state(
    batch, vocab_size, [_FEATURES[level]], eos_token_ids=eos_token_ids
  )


@struct.dataclass(frozen=True, kw_only=True)
class Queries:
  """Tokens behind which the target chooses."""

  slots: jax.Array  # i32[M]
  positions: jax.Array  # i32[M, 1] of the tokens that are chosen
  index: jax.Array  # i32[B, T] the queries of each slot, among the M
  num_drafted: jax.Array  # i32[B] draft tokens to verify
  is_sampled: jax.Array  # bool[B] slots that emit tokens

  @property
  def is_node(self) -> jax.Array:
    """bool[B, T]: which queries of the slots belong to a draft."""
    num_drafted = self.num_drafted[:, None]
    nodes = jnp.arange(self.index.shape[1])[None]
    return (nodes <= num_drafted) & (num_drafted > 0)


@functools.partial(jax.jit, static_argnames='vocab_size')
def make_noise(
  seeds: jax.Array, slots: jax.Array, positions: jax.Array, *, vocab_size: int
) -> jax.Array:
  """Returns the noise f32[M, T, V] of the tokens at some positions.

  A program of its own, as it takes longer to compile than all that use it.

  Args:
    seeds: u32[B] of the slots.
    slots: i32[M].
    positions: i32[M, T].
    vocab_size: V; static.
  """
  keys = sampling_lib.position_keys(
    seeds[slots], positions, sampling_lib.Stream.OUTPUT
  )
  return sampling_lib.gumbel_noise(keys, vocab_size)


@functools.partial(
  jax.jit,
  static_argnames=('reads_texts', 'kernels', 'sharding'),
  donate_argnames='rows',
)
def verify(
  logits: jax.Array,
  noise: jax.Array | None,
  token_ids: jax.Array,
  queries: Queries,
  drafted: jax.Array,
  sampling: sampling_lib.SamplingState,
  rows: RowState,
  trees: SlotTrees | None,
  *,
  reads_texts: bool,
  kernels: str,
  sharding: NamedSharding,
) -> tuple[RowState, jax.Array, types.Logprobs | None]:
  """Verifies drafts, and appends what stands to the texts.

  Args:
    logits: f32[M, V] logits of the target.
    noise: f32[M, 1, V] Gumbel noise, None where all slots are greedy.
    token_ids: i32[M] tokens of the queries.
    queries: rows and places of the queries.
    drafted: i32[B, K'] draft tokens, at least K if any are verified.
    sampling: sampling parameters of the slots.
    rows: texts of the slots; donated.
    trees: trees of the drafts; None where they are chains.
    reads_texts: whether the sampling looks at the texts; static.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.

  Returns:
    The texts; the packed `Verdicts` of the B slots; and the log-probabilities
    at the tokens, or None.
  """
  verdicts, logprobs = _judge(
    logits,
    noise,
    token_ids,
    queries,
    drafted,
    sampling,
    rows if reads_texts else None,
    trees,
    devices={'kernels': kernels, 'sharding': sharding},
  )
  num_emitted = jnp.minimum(verdicts.num_accepted + 1, rows.room)
  rows = spec_step.append_tokens(
    rows,
    verdicts.token_ids,
    jnp.where(queries.is_sampled, num_emitted, 0),
  )
  return rows, verdicts.pack(), logprobs


def _judge(
  logits, noise, token_ids, queries, drafted, sampling, rows, trees, devices
):
  """Returns what `verify` packs; with `rows` its sampling reads texts."""
  slots, positions = queries.slots, queries.positions[:, 0]
  own = jax.tree.map(lambda x: x[slots], sampling)
  adjusted = logits[:, None]
  if rows is not None:
    texts = rows.token_ids
    # Drafts are part of the text that the queries behind them look at.
    if trees is None:
      texts = texts.at[slots, positions - 1].set(token_ids)[slots]
    else:
      texts = _texts_behind(texts, queries, drafted, trees)
    adjusted = sampling_lib.adjust_logits(
      adjusted,
      own,
      token_ids=texts,
      lengths=positions,
      prompt_lengths=rows.prompt_lengths[slots],
      draft_token_ids=token_ids[:, None][:, :0],
    )
  if noise is None:
    choices = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
  else:
    law = sampling_lib.law_logits(adjusted, own, **devices)
    choices = sampling_lib.draw_with(law, noise)
  logprobs = spec_step.logprobs_of(logits[:, None], choices, own)
  choices = choices[:, 0][queries.index]
  logprobs = jax.tree.map(lambda x: x[:, 0][queries.index], logprobs)
  if trees is not None:
    return _follow_trees(choices, logprobs, queries, drafted, trees)
  proposal = types.Proposal(
    token_ids=drafted[:, : queries.index.shape[1] - 1],
    num_drafted=queries.num_drafted,
  )
  verdict = matching.verify(proposal, choices)
  verdicts = Verdicts(
    num_accepted=verdict.num_accepted,
    num_levels=queries.num_drafted,
    token_ids=verdict.token_ids,
    tree=None,
  )
  return verdicts, logprobs


def _follow_trees(choices, logprobs, queries, drafted, trees):
  """Does what `_judge` says for trees, with choices i32[B, T]."""
  # A tree may have fewer nodes than were asked for, such as behind a draft
  # whose logits are NaN: what is no node matches no choice.
  is_node = trees.parents[:, 1:] != tree_lib.NO_PARENT
  drafted = jnp.where(is_node, drafted, reference.NO_TOKEN)
  token_ids, num_accepted, path = reference.follow(
    choices,
    # What the root is does not matter.
    jnp.pad(drafted, ((0, 0), (1, 0))),
    trees.parents,
    queries.num_drafted + 1,
    trees.ancestor_mask,
  )
  num_levels = jnp.where(queries.is_node, trees.depths, 0).max(axis=1)
  rows = jnp.arange(len(path))[:, None]
  logprobs = jax.tree.map(lambda x: x[rows, path], logprobs)
  verdicts = Verdicts(
    num_accepted=num_accepted,
    num_levels=num_levels,
    token_ids=token_ids,
    tree=TreePart(
      path=path,
      is_looked_up=trees.is_looked_up[rows, path],
      choices=choices,
    ),
  )
  return verdicts, logprobs


def _texts_behind(texts, queries, drafted, trees):
  """Returns i32[M, S]: known tokens, and the nodes that lead to each query."""
  num_queries, text_size = len(queries.slots), texts.shape[1]
  nodes = jnp.broadcast_to(
    jnp.arange(queries.index.shape[1])[None], queries.index.shape
  )
  index = jnp.where(queries.is_node, queries.index, num_queries)
  own = jnp.zeros(num_queries, jnp.int32).at[index].set(nodes, mode='drop')
  slots = queries.slots
  roots = queries.positions[:, 0] - 1 - trees.depths[slots, own]
  positions = jnp.where(
    trees.ancestor_mask[slots, own],
    roots[:, None] + trees.depths[slots],
    text_size,
  )
  rows = jnp.arange(num_queries)[:, None]
  return (
    texts[slots].at[rows, positions[:, 1:]].set(drafted[slots], mode='drop')
  )


def choose_draft(
  logits: jax.Array,
  noise: jax.Array | None,
  slots: jax.Array,
  sampling: sampling_lib.SamplingState,
) -> jax.Array:
  """Returns what a draft chooses, i32[M], with the noise of the target.

  The same noise makes it choose the same token wherever the two laws agree.
  What the output is does not depend on it.

  Args:
    logits: f32[M, V] of the draft.
    noise: f32[M, V], None where all slots are greedy.
    slots: i32[M].
    sampling: sampling parameters of the slots, of the two lower levels.
  """
  noise = None if noise is None else noise[:, None]
  scores = draft_scores(logits[:, None], noise, slots, sampling)
  return jnp.argmax(scores[:, 0], axis=-1).astype(jnp.int32)


def draft_scores(
  logits: jax.Array,
  noise: jax.Array | None,
  slots: jax.Array,
  sampling: sampling_lib.SamplingState,
) -> jax.Array:
  """Returns f32[R, W, V] whose highest is what a draft chooses.

  The next ones are its next guesses: scores are logits in greedy slots, and
  those of the law with the noise in others.

  Args:
    logits: f32[R, W, V] of the draft.
    noise: f32[R, W, V], None where all slots are greedy.
    slots: i32[R].
    sampling: same as in `choose_draft`.
  """
  if noise is None:
    return logits
  temperatures = sampling.temperatures[slots][:, None, None]
  is_greedy = temperatures == 0
  drawn = logits / jnp.where(is_greedy, 1, temperatures) + noise
  return jnp.where(is_greedy, logits, drawn)


class SlotSampling:
  """The sampling of all slots, on the devices once it is needed there."""

  def __init__(
    self,
    num_slots: int,
    vocab_size: int,
    put,
    eos_token_ids: Sequence[int] = (),
  ):
    """Starts with greedy slots.

    Args:
      num_slots: B.
      vocab_size: V.
      put: function that brings host arrays to the devices.
      eos_token_ids: tokens at which the target ends an output.
    """
    self._vocab_size = vocab_size
    self._eos_token_ids = eos_token_ids
    self._put = put
    self._params = [SamplingParams()] * num_slots
    self._levels = np.zeros(num_slots, np.int64)
    self._law_levels = np.zeros(num_slots, np.int64)
    self._states: dict[Level, sampling_lib.SamplingState] = {}

  def set(self, slot: int, params: SamplingParams) -> None:
    """Gives a slot to another request."""
    self._params[slot] = params
    self._levels[slot] = level_of(params)
    # Logprobs change nothing.
    without = dataclasses.replace(params, logprobs=False, top_logprobs=0)
    self._law_levels[slot] = level_of(without)
    self._states = {}

  def level(self, slots: np.ndarray) -> Level:
    """Returns the lowest level that covers these slots."""
    return Level(int(self._levels[slots].max(initial=0)))

  def is_usable(self, slots: np.ndarray, *, for_model: bool) -> np.ndarray:
    """Returns bool[B]: whether slots i64[B] tell how good a drafter is.

    A draft model knows temperatures alone, so it cannot be expected to agree
    with a law that was cut. A lookup knows no law at all. Neither agrees with
    penalties, bias and bans.

    Args:
      slots: slots to ask for.
      for_model: a draft model drafts.
    """
    most = Level.TEMPERATURE if for_model else Level.TRUNCATED
    return self._law_levels[slots] <= most

  def forget_devices(self) -> None:
    """Puts what is asked for from now on where `put` does now."""
    self._states = {}
    self.__dict__.pop('_greedy', None)

  @functools.cached_property
  def _greedy(self) -> sampling_lib.SamplingState:
    return self._put(make_state(self._params, self._vocab_size, Level.GREEDY))

  def state(self, level: Level) -> sampling_lib.SamplingState:
    """Returns device arrays of all slots."""
    if level == Level.GREEDY:
      return self._greedy  # looks at nothing
    if level not in self._states:
      state = make_state(
        self._params, self._vocab_size, level, self._eos_token_ids
      )
      self._states[level] = self._put(state)
    return self._states[level]
