"""Prompt lookup in hindsight: what it would have drafted, and what came.

The host knows each text. So it can go through the tokens that have come,
whoever drafted them, as lookups would have: a policy learns what they are worth
before the target verifies any.

Legend: B rows of a view, U slots, K longest draft.
"""

import dataclasses

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import SlotTexts
from swiftspec_jax.drafters.texts.prompt_lookup import (
  LookupDrafter,
  PromptLookup,
)

# Tokens of a row, about: to go through many at once is faster.
_NUM_TOKENS = 8
_MAX_ROWS = 8  # at once; others have their turn later


@dataclasses.dataclass
class _Trail:
  """How far a slot has been followed.

  Attributes:
    request_id: number of its request.
    length: tokens of the text that were seen.
    chain: tokens that the last lookup found; None if the next token is to be
      looked up.
    place: tokens of the chain that came true.
  """

  request_id: int = -1
  length: int = 0
  chain: list[int] | None = None
  place: int = 0


class LookupHindsight:
  """Goes through texts as lookups would have."""

  def __init__(self, lookup: PromptLookup, num_slots: int):
    """Has seen nothing yet.

    Args:
      lookup: lookup, whose chains have K tokens.
      num_slots: U.
    """
    self._length = lookup.num_speculative_tokens
    self._drafter = LookupDrafter(lookup)
    self._trails = [_Trail() for _ in range(num_slots)]
    self._turn = self._num_new = 0

  def look_back(
    self,
    view: policies.StepView,
    texts: SlotTexts,
    is_present: np.ndarray,
    num_new: np.ndarray,
  ) -> policies.LookedUp | None:
    """Returns what has come since the last time; None if it is little.

    Args:
      view: view of a step that was read.
      texts: texts of the slots, with what the step has emitted.
      is_present: bool[B] rows whose requests had not ended before.
      num_new: i64[any] tokens that the step has emitted for each of these.
    """
    self._num_new += int(num_new.sum())
    if self._num_new < _NUM_TOKENS * max(view.num_rows, 1):
      return None
    self._num_new = 0
    # The last token of a text is not in the cache yet.
    lengths = np.zeros(view.num_rows, np.int64)
    lengths[is_present] = view.kv_lengths[is_present] + 1 + num_new
    told = policies.LookedUp.none(self._length, view.num_rows)
    self._turn += _MAX_ROWS
    for row in range(view.num_rows):
      slot, request_id = int(view.slots[row]), int(view.request_ids[row])
      trail, length = self._trails[slot], int(lengths[row])
      is_turn = (row - self._turn) % view.num_rows < _MAX_ROWS
      if trail.request_id == request_id and is_turn:
        self._follow(trail, texts.token_ids[slot, :length], told, row)
      else:
        trail.request_id, trail.chain, trail.place = request_id, None, 0
      trail.length = length
    return told

  def _follow(
    self,
    trail: _Trail,
    token_ids: np.ndarray,
    told: policies.LookedUp,
    row: int,
  ) -> None:
    """Goes through the new tokens of a text i32[any]."""
    new = token_ids[trail.length :].tolist()
    for place, token_id in enumerate(new, start=trail.length):
      if trail.chain is None:
        found = self._drafter.continuation(token_ids[:place], self._length)
        trail.chain, trail.place = found.tolist(), 0
        told.num_asked[row] += 1
        told.num_found[row] += len(found) > 0
      if trail.place < len(trail.chain):
        told.num_reached[trail.place, row] += 1
        if trail.chain[trail.place] == token_id:
          told.num_right[trail.place, row] += 1
          trail.place += 1
          continue
      trail.chain = None  # the token is the target's own
