"""Rejection sampling on a chain, which keeps the target's distribution.

A token drawn from the draft's distribution is accepted with probability
min(1, target / draft). At the first rejection a token is recovered from the
normalised residual max(target - draft, 0). If all are accepted, a bonus token
is drawn from the target (Leviathan et al. 2023, arXiv 2211.17192; Chen et al.
2023, arXiv 2302.01318).
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from kernels_pallas.rejection import api
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax import types


def verify(
  proposal: types.Proposal,
  logits: jax.Array,
  positions: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> types.Verdict:
  """Verifies a chain at any temperature; greedy rows are one-hot distributions.

  Args:
    proposal: K draft tokens for each row, with `probs`.
    logits: f32[B, K + 1, V] of the target, adjusted.
    positions: i32[B, K + 1] of the tokens that the logits are for.
    sampling: sampling parameters of the rows, with `temperatures`.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.
  """
  law = sampling_lib.law_logits(
    logits, sampling, kernels=kernels, sharding=sharding
  )
  token_ids = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))
  bars = _bars(proposal, positions, sampling.seeds)
  num_accepted, normalisers = api.accept_chain(
    law,
    token_ids,
    jnp.pad(bars, ((0, 0), (0, 1)), constant_values=jnp.inf),
    implementation=kernels,
    sharding=sharding,
  )

  last = num_accepted[:, None, None]
  target_last = jnp.exp(
    jnp.take_along_axis(law, last, axis=1)
    - jnp.take_along_axis(normalisers[:, :, None], last, axis=1)
  )
  # Where no draft token was rejected, the residual is the target's own law: the
  # bonus token, and the token of a row that drafted less than K.
  is_rejected = num_accepted < proposal.num_drafted
  rejected = jnp.where(is_rejected, num_accepted, proposal.probs.shape[1])
  draft_last = jnp.take_along_axis(
    proposal.probs, rejected[:, None, None], axis=1, mode='fill', fill_value=0
  )
  residual = jnp.maximum(target_last - draft_last, 0)
  # Rounding can empty the residual of two equal distributions, which are never
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
  token_ids = jnp.where(
    steps < num_accepted[:, None],
    token_ids,
    jnp.where(
      steps == num_accepted[:, None], next_token, types.PLACEHOLDER_TOKEN_ID
    ),
  )
  return types.Verdict(token_ids=token_ids, num_accepted=num_accepted)


def _bars(proposal, positions, seeds):
  """f32[B, K]: what the target's probability of a token must exceed.

  Each token has a draw of its own, whatever came before it.
  """
  keys = sampling_lib.position_keys(
    seeds, positions[:, :-1], sampling_lib.Stream.ACCEPT
  )
  uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
  index = proposal.token_ids[:, :, None]
  draft = jnp.take_along_axis(proposal.probs, index, axis=2)[..., 0]
  places = jnp.arange(proposal.token_ids.shape[1])[None]
  is_drafted = places < proposal.num_drafted[:, None]
  return jnp.where(is_drafted, uniform * draft, jnp.inf)
