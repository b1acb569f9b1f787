"""What the requests in the slots use of `SamplingParams`.

A step takes the lowest of four compiled levels that covers its rows. A level
changes nothing for a row that does not need it.

Legend: B slots, V vocabulary.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.config import SamplingParams

_MAX_FORCED = 16


class SamplingLevel(enum.IntEnum):
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
  SamplingLevel.GREEDY: SamplingParams(),
  SamplingLevel.TEMPERATURE: SamplingParams(**_DRAWN),
  SamplingLevel.TRUNCATED: SamplingParams(**_CUT),
  SamplingLevel.ADJUSTED: SamplingParams(**_ADJUSTED),
}


def level_of(params: SamplingParams) -> SamplingLevel:
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
    return SamplingLevel.ADJUSTED
  if params.temperature == 0:
    return SamplingLevel.GREEDY
  if params.top_k or params.top_p < 1 or params.min_p:
    return SamplingLevel.TRUNCATED
  return SamplingLevel.TEMPERATURE


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
  level: SamplingLevel,
  eos_token_ids: Sequence[int] = (),
) -> sampling_lib.SamplingState:
  """Returns host arrays of all slots for a level."""
  return sampling_lib.make_state(
    batch, vocab_size, [_FEATURES[level]], eos_token_ids=eos_token_ids
  )


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
    self._states: dict[SamplingLevel, sampling_lib.SamplingState] = {}

  def set(self, slot: int, params: SamplingParams) -> None:
    """Gives a slot to another request."""
    self._params[slot] = params
    self._levels[slot] = level_of(params)
    # Logprobs change nothing.
    without = dataclasses.replace(params, logprobs=False, top_logprobs=0)
    self._law_levels[slot] = level_of(without)
    self._states = {}

  def level(self, slots: np.ndarray) -> SamplingLevel:
    """Returns the lowest level that covers these slots."""
    return SamplingLevel(int(self._levels[slots].max(initial=0)))

  def is_usable(self, slots: np.ndarray, *, for_model: bool) -> np.ndarray:
    """Returns bool[B]: whether slots i64[B] tell how good a drafter is.

    A draft model knows temperatures alone, so it cannot be expected to agree
    with a distribution that was cut. A lookup knows no distribution at all.
    Neither agrees with penalties, bias and bans.

    Args:
      slots: slots to ask for.
      for_model: a draft model drafts.
    """
    most = SamplingLevel.TEMPERATURE if for_model else SamplingLevel.TRUNCATED
    return self._law_levels[slots] <= most

  def forget_devices(self) -> None:
    """Puts what is asked for from now on where `put` does now."""
    self._states = {}
    self.__dict__.pop('_greedy', None)

  @functools.cached_property
  def _greedy(self) -> sampling_lib.SamplingState:
    return self._put(
      make_state(self._params, self._vocab_size, SamplingLevel.GREEDY)
    )

  def state(self, level: SamplingLevel) -> sampling_lib.SamplingState:
    """Returns device arrays of all slots."""
    if level == SamplingLevel.GREEDY:
      return self._greedy  # looks at nothing
    if level not in self._states:
      state = make_state(
        self._params, self._vocab_size, level, self._eos_token_ids
      )
      self._states[level] = self._put(state)
    return self._states[level]
