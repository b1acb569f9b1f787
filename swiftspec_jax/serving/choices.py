"""What the target chooses behind its queries, and what stands of the drafts.

Sample and match (`verification.matching`): the noise belongs to the request's
seed and the position, so a request has the same output whatever it shares its
steps with, whatever was drafted for it, and whether or not it was preempted.

Every query is a row of its own here, so rows of different lengths need no
padding. Requests differ in what they use of `SamplingParams`; a step takes the
lowest of four compiled levels that covers its rows. A level changes nothing
for a row that does not need it.

Legend: M queries, T queries of the longest draft, K = T - 1, B slots, S tokens
of the longest text, V vocabulary.
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

from swiftspec_jax import errors, spec_step, types
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.verification import matching

_MAX_FORCED = 16


class Level(enum.IntEnum):
  """How much of `SamplingParams` a request uses."""

  GREEDY = 0
  TEMPERATURE = 1
  TRUNCATED = 2
  ADJUSTED = 3  # penalty, bias, bans, forced tokens, logprobs


_DRAWN = {'temperature': 1.0}
_CUT = {**_DRAWN, 'top_k': 1, 'top_p': 0.5, 'min_p': 0.5}
_ADJUSTED = {
  **_CUT,
  'repetition_penalty': 2.0,
  'banned_token_ids': (0,),
  'forced_token_ids': (0,) * _MAX_FORCED,
  'logprobs': True,
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
    or params.logit_bias
    or params.banned_token_ids
    or params.forced_token_ids
    or params.logprobs
  ):
    return Level.ADJUSTED
  if params.temperature == 0:
    return Level.GREEDY
  if params.top_k or params.top_p < 1 or params.min_p:
    return Level.TRUNCATED
  return Level.TEMPERATURE


def _is_usable(params: SamplingParams) -> bool:
  without = dataclasses.replace(params, logprobs=False)
  return level_of(without) < Level.ADJUSTED


def check(params: SamplingParams) -> None:
  """Raises UserError for more forced tokens than there is room for."""
  if len(params.forced_token_ids) > _MAX_FORCED:
    raise errors.UserError(
      f'forced_token_ids has {len(params.forced_token_ids)} tokens, an engine '
      f'takes at most {_MAX_FORCED}'
    )


def make_state(
  batch: Sequence[SamplingParams], vocab_size: int, level: Level
) -> sampling_lib.SamplingState:
  """Returns host arrays of all slots for a level."""
  return sampling_lib.make_state(batch, vocab_size, [_FEATURES[level]])


@struct.dataclass(frozen=True, kw_only=True)
class Queries:
  """Tokens behind which the target chooses."""

  slots: jax.Array  # i32[M]
  positions: jax.Array  # i32[M, 1] of the tokens that are chosen
  index: jax.Array  # i32[B, T] the queries of each slot, among the M
  num_drafted: jax.Array  # i32[B] draft tokens to verify
  prompt_lengths: jax.Array  # i32[B]


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


@functools.partial(jax.jit, static_argnames=('kernels', 'sharding'))
def verify(
  logits: jax.Array,
  noise: jax.Array | None,
  token_ids: jax.Array,
  queries: Queries,
  drafted: jax.Array,
  sampling: sampling_lib.SamplingState,
  texts: jax.Array | None,
  *,
  kernels: str,
  sharding: NamedSharding,
) -> tuple[jax.Array, jax.Array | None]:
  """Verifies chains.

  Args:
    logits: f32[M, V] of the target.
    noise: f32[M, 1, V], None where all slots are greedy.
    token_ids: i32[M] of the queries.
    queries: where they belong.
    drafted: i32[B, K'] draft tokens, at least K if any are verified.
    sampling: of the slots.
    texts: i32[B, S] what is known; only where the sampling looks at it.
    kernels: static; as in `ModelConfig`.
    sharding: static; of an array on the same devices.

  Returns:
    i32[B, 1 + T], the number of accepted draft tokens and the tokens, and
    f32[B, T] their log-probabilities or None.
  """
  slots, positions = queries.slots, queries.positions[:, 0]
  own = jax.tree.map(lambda x: x[slots], sampling)
  adjusted = logits[:, None]
  if texts is not None:
    # Drafts are part of the text that the queries behind them look at.
    texts = texts.at[slots, positions - 1].set(token_ids)
    adjusted = sampling_lib.adjust_logits(
      adjusted,
      own,
      token_ids=texts[slots],
      lengths=positions,
      prompt_lengths=queries.prompt_lengths[slots],
      draft_token_ids=token_ids[:, None][:, :0],
    )
  if noise is None:
    choices = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
  else:
    law = sampling_lib.law_logits(
      adjusted, own, kernels=kernels, sharding=sharding
    )
    choices = sampling_lib.draw_with(law, noise)
  logprobs = spec_step.logprobs_of(logits[:, None], choices, own)
  proposal = types.Proposal(
    token_ids=drafted[:, : queries.index.shape[1] - 1],
    num_drafted=queries.num_drafted,
  )
  verdict = matching.verify(proposal, choices[:, 0][queries.index])
  packed = jnp.concatenate(
    [verdict.num_accepted[:, None], verdict.token_ids], axis=1
  )
  if logprobs is not None:
    logprobs = logprobs[:, 0][queries.index]
  return packed, logprobs


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
    sampling: of the slots, of the two lower levels.
  """
  if noise is None:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  own = jax.tree.map(lambda x: x[slots], sampling)
  law = sampling_lib.law_logits(logits[:, None], own)
  return sampling_lib.draw_with(law, noise[:, None])[:, 0]


class SlotSampling:
  """The sampling of all slots, on the devices once it is needed there.

  Attributes:
    is_usable: bool[B]: whether what the target says is its own opinion, which
      a draft can be expected to share.
  """

  def __init__(self, num_slots: int, vocab_size: int, put):
    """Starts with greedy slots.

    Args:
      num_slots: B.
      vocab_size: V.
      put: function that brings host arrays to the devices.
    """
    self.is_usable = np.ones(num_slots, bool)
    self._vocab_size = vocab_size
    self._put = put
    self._params = [SamplingParams()] * num_slots
    self._levels = np.zeros(num_slots, np.int64)
    self._states: dict[Level, sampling_lib.SamplingState] = {}

  def set(self, slot: int, params: SamplingParams) -> None:
    """Gives a slot to another request."""
    self._params[slot] = params
    self._levels[slot] = level_of(params)
    self.is_usable[slot] = _is_usable(params)
    self._states = {}

  def level(self, slots: np.ndarray) -> Level:
    """Returns the lowest level that covers these slots."""
    return Level(int(self._levels[slots].max(initial=0)))

  @functools.cached_property
  def _greedy(self) -> sampling_lib.SamplingState:
    return self._put(make_state(self._params, self._vocab_size, Level.GREEDY))

  def state(self, level: Level) -> sampling_lib.SamplingState:
    """Returns device arrays of all slots."""
    if level == Level.GREEDY:
      return self._greedy  # looks at nothing
    if level not in self._states:
      state = make_state(self._params, self._vocab_size, level)
      self._states[level] = self._put(state)
    return self._states[level]
