"""Pytrees that carry one decoding step's data between the parts.

Legend: B rows, S cache capacity, K speculative tokens, T = K + 1 query
tokens, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.cache import dense
from swiftspec_jax.sampling import SamplingState

PLACEHOLDER_TOKEN_ID = -1  # fills token rows behind the last output token


@struct.dataclass(frozen=True, kw_only=True)
class Proposal:
  """A chain of draft tokens for each row."""

  token_ids: jax.Array  # i32[B, K]
  num_drafted: jax.Array  # i32[B] draft tokens that count, 0..K
  # f32[B, K, V] the law each token was sampled from; None: each was the only
  # choice (probability one).
  probs: jax.Array | None = None


@struct.dataclass(frozen=True, kw_only=True)
class Verdict:
  """What the target makes of a proposal."""

  # i32[B, T] accepted tokens, then the recovered or bonus token, then
  # PLACEHOLDER_TOKEN_ID.
  token_ids: jax.Array
  num_accepted: jax.Array  # i32[B] accepted draft tokens, 0..K


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
class StepOutput:
  """What the host reads of a step: one small array, and logprobs if asked.

  `packed` i32[B, 3 + T] holds num_emitted, num_drafted, num_accepted and the
  output token ids.
  """

  packed: jax.Array
  logprobs: jax.Array | None  # f32[B, T]

  @classmethod
  def pack(
    cls,
    *,
    num_emitted: jax.Array,
    num_drafted: jax.Array,
    verdict: Verdict,
    logprobs: jax.Array | None,
  ) -> 'StepOutput':
    counts = jnp.stack([num_emitted, num_drafted, verdict.num_accepted], axis=1)
    packed = jnp.concatenate([counts, verdict.token_ids], axis=1)
    return cls(packed=packed, logprobs=logprobs)
