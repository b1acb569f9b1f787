"""Drafters: cheap proposers of tokens that the target then verifies.

A drafter is a frozen dataclass of plain values (a static argument of the
step); what changes lives in its own pytree, the draft state.
"""

from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from swiftspec_jax import types


class Drafter(Protocol):
  """Proposes up to `num_speculative_tokens` tokens for each row."""

  @property
  def num_speculative_tokens(self) -> int:
    """K; the shape of every proposal."""

  @property
  def lengths(self) -> tuple[int, ...]:
    """Ascending lengths of a draft that a step is compiled for; K is last.

    A step is as short as the longest draft of its rows allows.
    """

  def init(self, batch_size: int, capacity: int, mesh: Mesh) -> Any:
    """Returns an empty draft state; all leaves have a leading batch axis."""

  def prefill(
    self,
    params: Any,
    draft_state: Any,
    token_ids: jax.Array,
    starts: jax.Array,
    num_kept: jax.Array,
    context: int,
  ) -> Any:
    """Reads a chunk of a prompt; enqueues programs of its own, if any.

    Args:
      params: parameters of the drafter.
      draft_state: donated.
      token_ids: i32[B, C].
      starts: i32[B] position of the first of them.
      num_kept: i32[B] tokens of the prompt that have been read afterwards. What
        the chunk has behind them is padding.
      context: positions of the chunk are below it.
    """

  def propose(
    self, params: Any, state: types.DecodeState
  ) -> tuple[types.Proposal, Any]:
    """Returns a proposal for the tokens behind `state.lengths`.

    Returns the new draft state, too. Rejected tokens need no call: the next
    proposal starts from the committed lengths.
    """


class StatelessDrafter:
  """Base of drafters that need neither parameters nor a state.

  A `PageEngine` asks them, too. What it gives `propose` has `token_ids`,
  `lengths`, `prompt_lengths` and `max_lengths` of its slots.
  """

  def init(self, batch_size, capacity, mesh):
    del batch_size, capacity, mesh

  def prefill(self, params, draft_state, token_ids, starts, num_kept, context):
    del params, draft_state, token_ids, starts, num_kept, context
