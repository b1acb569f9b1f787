"""What the requests in the slots use of `SamplingParams`.

A step takes the lowest of four compiled levels that covers its rows. A level
changes nothing for a row that does not need it.

Legend: B slots, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from swiftspec_jax.config import SamplingParams
from swiftspec_jax.step.sampling import SamplingLevel, SamplingState, make_state


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


class SlotSampling:
  """The sampling of all slots, on the devices once it is needed there.

  Attributes:
    least_level: level that steps take at least.
    has_grammar: bool[B] slots whose outputs follow a grammar.
  """

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
    self.least_level = SamplingLevel.GREEDY
    self._vocab_size = vocab_size
    self._eos_token_ids = eos_token_ids
    self._put = put
    self._params = [SamplingParams()] * num_slots
    self.has_grammar = np.zeros(num_slots, bool)
    self._levels = np.zeros(num_slots, np.int64)
    self._distribution_levels = np.zeros(num_slots, np.int64)
    self._states: dict[SamplingLevel, SamplingState] = {}

  def set(self, slot: int, params: SamplingParams) -> None:
    """Gives a slot to another request."""
    self._params[slot] = params
    self.has_grammar[slot] = params.structured_outputs is not None
    self._levels[slot] = level_of(params)
    # Logprobs change nothing.
    without = dataclasses.replace(params, logprobs=False, top_logprobs=0)
    self._distribution_levels[slot] = level_of(without)
    self._states = {}

  def level(self, slots: np.ndarray) -> SamplingLevel:
    """Returns the level of a step of these slots."""
    return SamplingLevel(int(self._levels[slots].max(initial=self.least_level)))

  def is_usable(self, slots: np.ndarray, *, for_model: bool) -> np.ndarray:
    """Returns bool[B]: whether slots i64[B] tell how good a drafter is.

    A draft model knows temperatures alone, so it cannot be expected to agree
    with a distribution that was cut. A lookup knows no distribution at all.
    Neither agrees with penalties, bias, bans and grammars.

    Args:
      slots: slots to ask for.
      for_model: a draft model drafts.
    """
    most = SamplingLevel.TEMPERATURE if for_model else SamplingLevel.TRUNCATED
    return (self._distribution_levels[slots] <= most) & ~self.has_grammar[slots]

  @functools.cached_property
  def _greedy(self) -> SamplingState:
    return self._put(
      make_state(self._params, self._vocab_size, SamplingLevel.GREEDY)
    )

  def state(self, level: SamplingLevel) -> SamplingState:
    """Returns device arrays of all slots."""
    if level == SamplingLevel.GREEDY:
      return self._greedy  # looks at nothing
    if level not in self._states:
      state = make_state(
        self._params,
        self._vocab_size,
        level,
        eos_token_ids=self._eos_token_ids,
      )
      self._states[level] = self._put(state)
    return self._states[level]
