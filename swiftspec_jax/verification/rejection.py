"""Rejection sampling on a chain: the output law is exactly the target's.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318): a
token drawn from the draft's law is accepted with probability
min(1, target / draft); at the first rejection a token is recovered from the
normalised residual max(target - draft, 0); if all are accepted, a bonus token
is drawn from the target.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import types
from swiftspec_jax.verification import matching


def verify(
  proposal: types.Proposal,
  logits: jax.Array,
  positions: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> types.Verdict:
  """Verifies a chain at any temperature; greedy rows are one-hot laws.

  Args:
    proposal: K draft tokens for each row, with `probs`.
    logits: f32[B, K + 1, V] of the target, adjusted.
    positions: i32[B, K + 1] of the tokens that the logits are for.
    sampling: of the rows, with `temperatures`.
    kernels: static; as in `ModelConfig`.
    sharding: static; of an array on the same devices.
  """
  law = sampling_lib.law_logits(
    logits, sampling, kernels=kernels, sharding=sharding
  )
  target_probs = jax.nn.softmax(law, axis=-1)
  draft_probs = _draft_probs(proposal)
  accepts = _accepts(
    proposal.token_ids, target_probs, draft_probs, positions, sampling.seeds
  )
  num_accepted = matching.count_accepted(accepts, proposal.num_drafted)

  last = num_accepted[:, None, None]
  target_last = jnp.take_along_axis(target_probs, last, axis=1)
  residual = jnp.maximum(
    target_last - jnp.take_along_axis(draft_probs, last, axis=1), 0
  )
  # Rounding can empty the residual of two equal laws, which are never
  # rejected in exact arithmetic.
  has_residual = residual.sum(-1, keepdims=True) > 0
  residual = jnp.where(has_residual, residual, target_last)
  next_token = sampling_lib.draw(
    jnp.log(residual),
    sampling_lib.position_keys(
      sampling.seeds,
      jnp.take_along_axis(positions, num_accepted[:, None], axis=1),
      sampling_lib.Stream.OUTPUT,
    ),
  )
  steps = jnp.arange(logits.shape[1])[None]
  accepted = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))
  token_ids = jnp.where(
    steps < num_accepted[:, None],
    accepted,
    jnp.where(
      steps == num_accepted[:, None], next_token, types.PLACEHOLDER_TOKEN_ID
    ),
  )
  return types.Verdict(token_ids=token_ids, num_accepted=num_accepted)


def _draft_probs(proposal: types.Proposal) -> jax.Array:
  """Returns f32[B, K + 1, V]; zero where there is no draft token.

  With a draft law of zero the residual is the target's own law: the bonus
  token, and the token of a row that drafted less than K.
  """
  probs = proposal.probs
  num_tokens = probs.shape[1]
  is_drafted = jnp.arange(num_tokens)[None] < proposal.num_drafted[:, None]
  probs = jnp.where(is_drafted[:, :, None], probs, 0)
  return jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))


def _accepts(token_ids, target_probs, draft_probs, positions, seeds):
  """bool[B, K]: each draft token's own draw, whatever came before it."""
  keys = sampling_lib.position_keys(
    seeds, positions[:, :-1], sampling_lib.Stream.ACCEPT
  )
  uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
  index = token_ids[:, :, None]
  target = jnp.take_along_axis(target_probs[:, :-1], index, axis=2)[..., 0]
  draft = jnp.take_along_axis(draft_probs[:, :-1], index, axis=2)[..., 0]
  return uniform * draft < target
