"""Pytrees that carry one decoding step's data between the parts.

Legend: B rows, S cache capacity, K speculative tokens, T = K + 1 query
tokens (the nodes of a tree, its root included), V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax.cache import dense
from swiftspec_jax.sampling import SamplingState

PLACEHOLDER_TOKEN_ID = -1  # fills token rows behind the last output token
NO_OUTCOME = -1  # of rounds without a tree
_NUM_COUNTS = 6  # that lead a packed step


@struct.dataclass(frozen=True, kw_only=True)
class Proposal:
  """A chain of draft tokens for each row."""

  token_ids: jax.Array  # i32[B, K]
  num_drafted: jax.Array  # i32[B] draft tokens that count, 0..K
  # f32[B, K, V] the distribution each token was drawn from; None: they were not
  # drawn
  # at random.
  probs: jax.Array | None = None


@struct.dataclass(frozen=True, kw_only=True)
class TreeProposal:
  """A part of the draft's tree for each row: all that the target gets of it.

  Parents stand before their children, the root first, padding last. It goes to
  the target as one array, because each transfer costs the host time.
  """

  token_ids: jax.Array  # i32[B, T] PLACEHOLDER_TOKEN_ID for padding
  parents: jax.Array  # i32[B, T] indices, -1 for root and padding
  depths: jax.Array  # i32[B, T] 0 for the root
  size: jax.Array  # i32[B] nodes
  # What people want to know of a node:
  is_looked_up: jax.Array  # bool[B, T] came of a text first, not of the draft
  log_probs: jax.Array  # f32[B, T] sum from the root, -inf for padding
  # How the draft came to it, for the statistics:
  outcome: jax.Array  # i32[B] of the last verdict: tree.MISS, LATE_HIT or HIT
  num_forwards: jax.Array  # i32[B] draft forwards after that verdict

  def pack(self) -> jax.Array:
    """Returns i32[B, 5 T + 3]."""
    nodes = [
      self.token_ids,
      self.parents,
      self.depths,
      self.is_looked_up.astype(jnp.int32),
      jax.lax.bitcast_convert_type(self.log_probs, jnp.int32),
    ]
    counts = [self.size, self.outcome, self.num_forwards]
    return jnp.concatenate([*nodes, *(x[:, None] for x in counts)], axis=1)

  @classmethod
  def unpack(cls, packed: jax.Array) -> 'TreeProposal':
    nodes, counts = packed[:, :-3], packed[:, -3:]
    token_ids, parents, depths, is_looked_up, log_probs = jnp.split(
      nodes, 5, axis=1
    )
    return cls(
      token_ids=token_ids,
      parents=parents,
      depths=depths,
      is_looked_up=is_looked_up > 0,
      log_probs=jax.lax.bitcast_convert_type(log_probs, jnp.float32),
      size=counts[:, 0],
      outcome=counts[:, 1],
      num_forwards=counts[:, 2],
    )

  def first(self, num_nodes: int) -> 'TreeProposal':
    """Returns the first nodes; no row may have more."""
    return self.replace(
      token_ids=self.token_ids[:, :num_nodes],
      parents=self.parents[:, :num_nodes],
      depths=self.depths[:, :num_nodes],
      is_looked_up=self.is_looked_up[:, :num_nodes],
      log_probs=self.log_probs[:, :num_nodes],
    )


@struct.dataclass(frozen=True, kw_only=True)
class Verdict:
  """What the target makes of a proposal."""

  # i32[B, T] accepted tokens, then the recovered or bonus token, then
  # PLACEHOLDER_TOKEN_ID.
  token_ids: jax.Array
  num_accepted: jax.Array  # i32[B] accepted draft tokens, 0..K


@struct.dataclass(frozen=True, kw_only=True)
class VerifiedTokens:
  """What the draft has to follow: all that it gets of the target.

  One array, as a proposal.
  """

  # i32[B, T] accepted tokens, then the next one, then anything.
  token_ids: jax.Array
  num_tokens: jax.Array  # i32[B] how many count; 0 in rows at their end

  def pack(self) -> jax.Array:
    """Returns i32[B, T + 1]."""
    return jnp.concatenate([self.token_ids, self.num_tokens[:, None]], axis=1)

  @classmethod
  def unpack(cls, packed: jax.Array) -> 'VerifiedTokens':
    return cls(token_ids=packed[:, :-1], num_tokens=packed[:, -1])


# All that the draft gets of the target in a round: packed `VerifiedTokens`
# i32[B, T + 1]. A draft that reads features gets those of the old root and the
# accepted tokens, too, bf16[B, T, H].
PackedVerified = jax.Array | tuple[jax.Array, jax.Array]


@struct.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """Everything a step reads and returns; each row is on its own."""

  token_ids: jax.Array  # i32[B, S] prompt and output so far
  # i32[B] tokens known. The last of them is not in the target's cache yet:
  # it is the root of the next step.
  lengths: jax.Array
  prompt_lengths: jax.Array  # i32[B]
  max_lengths: jax.Array  # i32[B] rows stop here; idle rows have 0
  target_cache: dense.KVCache
  draft_state: Any  # the drafter's own pytree
  sampling: SamplingState


@struct.dataclass(frozen=True, kw_only=True)
class Logprobs:
  """Log-probabilities at positions of the output, before any adjustment."""

  chosen: jax.Array  # f32[B, T] of the tokens there
  # The K most probable tokens there, the best first; K may be 0.
  top: jax.Array  # f32[B, T, K]
  top_token_ids: jax.Array  # i32[B, T, K]

  @classmethod
  def at(
    cls, logits: jax.Array, token_ids: jax.Array, num_top: int
  ) -> 'Logprobs':
    """Returns those at tokens.

    Args:
      logits: f32[B, T, V], not adjusted.
      token_ids: i32[B, T]; padding gets anything.
      num_top: number K of the most probable tokens.
    """
    index = jnp.maximum(token_ids, 0)[:, :, None]
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    top, top_token_ids = jax.lax.top_k(log_probs, num_top)
    return cls(
      chosen=jnp.take_along_axis(log_probs, index, axis=2)[:, :, 0],
      top=top,
      top_token_ids=top_token_ids,
    )


@struct.dataclass(frozen=True, kw_only=True)
class StepOutput:
  """What the host reads of a step: one small array, and logprobs if asked.

  Read as `StepReport.unpack` says.
  """

  packed: jax.Array  # i32[B, ...]
  logprobs: Logprobs | None

  @classmethod
  def pack(
    cls,
    *,
    num_emitted: jax.Array,
    proposal: Proposal | TreeProposal,
    verdict: Verdict,
    logprobs: Logprobs | None,
    path: jax.Array | None = None,
  ) -> 'StepOutput':
    """Packs a step; `path` i32[B, T] are the accepted nodes of a tree."""
    is_looked_up = jnp.zeros_like(verdict.token_ids)
    if isinstance(proposal, Proposal):
      num_drafted = num_levels = proposal.num_drafted
      outcome = jnp.full_like(num_drafted, NO_OUTCOME)
      num_forwards = jnp.zeros_like(num_drafted)
      path = jnp.zeros_like(verdict.token_ids)
    else:
      num_drafted = proposal.size - 1
      num_levels = proposal.depths.max(axis=1)
      outcome, num_forwards = proposal.outcome, proposal.num_forwards
      is_looked_up = jnp.take_along_axis(proposal.is_looked_up, path, axis=1)
    counts = (
      num_emitted,
      num_drafted,
      num_levels,
      verdict.num_accepted,
      outcome,
      num_forwards,
    )
    packed = [
      jnp.stack(counts, axis=1),
      verdict.token_ids,
      path,
      is_looked_up.astype(jnp.int32),
    ]
    return cls(packed=jnp.concatenate(packed, axis=1), logprobs=logprobs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
  """One row of a step's output, on the host."""

  token_ids: list[int]  # emitted
  num_drafted: int
  num_levels: int  # length of the longest chain that was drafted
  num_accepted: int
  is_tree: bool  # whether the draft was a tree
  outcome: int  # of the verdict before; NO_OUTCOME where no tree lives on
  num_forwards: int  # of the draft after that verdict, for a tree
  path: list[int]  # indices of root and accepted nodes, for a tree
  # Which accepted draft tokens came of a text, where a model drafts, too.
  is_looked_up: list[bool]

  @classmethod
  def unpack(cls, packed: np.ndarray) -> 'StepReport':
    """Reads a row i32[...] of `StepOutput.packed`."""
    num_emitted, *counts = packed[:_NUM_COUNTS].tolist()
    token_ids, path, is_looked_up = np.split(packed[_NUM_COUNTS:], 3)
    names = (
      'num_drafted',
      'num_levels',
      'num_accepted',
      'outcome',
      'num_forwards',
    )
    report = dict(zip(names, counts, strict=True))
    end = report['num_accepted'] + 1
    return cls(
      token_ids=token_ids[:num_emitted].tolist(),
      is_tree=report['outcome'] != NO_OUTCOME,
      path=path[:end].tolist(),
      is_looked_up=is_looked_up[1:end].astype(bool).tolist(),
      **report,
    )
