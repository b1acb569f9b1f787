"""Prompt lookup that drafts as many tokens as are worth their time, or none.

How often the tokens of a chain come true is counted by the length of the match
(`text_lookup`), and how long a step takes is measured. So each step sends the
length with the most expected tokens per second, SmartSpec's goodput (arXiv
2406.14066) for a single step. It is chosen on the device, and the host need not
know it.

Legend: B rows, K speculative tokens, N lengths of a draft.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from swiftspec_jax import errors, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax.drafting.texts import text_lookup
from swiftspec_jax.tree import arrays

_KINDS = (text_lookup.PROMPT_LOOKUP,)
# Gain that a draft must promise: the best of some estimates is too good.
_MARGIN = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLookup:
  """Proposes the part of prompt lookup's chain that is worth its time.

  Its parameters are the seconds f32[N] of a step for each of `lengths`.

  Attributes:
    num_speculative_tokens: tokens of the longest draft (K).
  """

  num_speculative_tokens: int = 7

  def __post_init__(self):
    is_valid = self.num_speculative_tokens >= 1
    errors.check_fields(
      self, {'num_speculative_tokens': (is_valid, 'at least 1')}
    )

  @property
  def lengths(self) -> tuple[int, ...]:
    """Lengths to choose from: 0, 3, 7 and so on, and K.

    With the root those are powers of two. Two tokens are none of them: they
    take as long as four, and have to be compiled, too.
    """
    longest = self.num_speculative_tokens
    shorter = [2**n - 1 for n in range(2, longest) if 2**n - 1 < longest]
    return 0, *shorter, longest

  def forcing(self, length: int) -> np.ndarray:
    """Returns the parameters with which every draft has this length."""
    is_other = np.array(self.lengths) != length
    return np.where(is_other, np.inf, 1).astype(np.float32)

  def init(self, batch_size, capacity, mesh):
    rows = text_lookup.empty_rows(
      batch_size, capacity, self.num_speculative_tokens, _KINDS
    )
    return sharding_lib.replicate(rows, mesh)

  def prefill(self, params, draft_state, token_ids, starts, num_kept, context):
    """Leaves the state empty: `propose` reads a new row's whole text."""
    del params, token_ids, starts, num_kept, context
    return draft_state

  def propose(self, params, state):
    lookup, log_probs = text_lookup.look_up(_follow(state))
    log_probs = log_probs[:, 0]  # of the only chain
    is_active = state.lengths < state.max_lengths
    length = self._best_length(log_probs, is_active, params)
    # Idle rows draft, too, so that steps can be timed with them.
    has_draft = (lookup.match_lengths[:, 0] > 0) | ~is_active
    proposal = types.Proposal(
      token_ids=lookup.chains[:, 0],
      num_drafted=jnp.where(has_draft, length, 0),
    )
    return proposal, lookup

  def _best_length(self, log_probs, is_active, seconds):
    """Returns i32[], the length with the most expected tokens per second."""
    reached = jnp.exp(jnp.cumsum(log_probs, axis=1))
    by_depth = jnp.sum(reached, axis=0, where=is_active[:, None])
    accepted = jnp.concatenate([jnp.zeros(1), jnp.cumsum(by_depth)])
    lengths = jnp.asarray(self.lengths)
    num_rows = jnp.sum(is_active, dtype=jnp.float32)
    num_tokens = num_rows + accepted[lengths]
    # Even where all rows are idle, the finite one of `seconds` wins.
    rates = jnp.maximum(num_tokens, 1) / seconds
    return lengths[jnp.argmax(rates.at[0].multiply(_MARGIN))]


def _follow(state: types.DecodeState) -> text_lookup.TextLookup:
  """Counts which chains came true; an empty state has none."""
  lookup = state.draft_state
  steps = jnp.arange(lookup.chains.shape[2])[None]
  new = types.VerifiedTokens(
    token_ids=arrays.take(state.token_ids, lookup.lengths[:, None] + steps),
    num_tokens=jnp.maximum(state.lengths - lookup.lengths, 0),
  )
  lookup = text_lookup.follow(lookup, new)
  return dataclasses.replace(
    lookup, token_ids=state.token_ids, lengths=state.lengths
  )
