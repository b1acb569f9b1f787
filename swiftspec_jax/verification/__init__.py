"""Verifiers: which draft tokens stand, and what follows them."""

import jax
from jax.sharding import NamedSharding

from kernels_pallas import dispatch
from swiftspec_jax import types
from swiftspec_jax.sampling import SamplingState
from swiftspec_jax.verification import matching, rejection


def verify(
  proposal: types.Proposal,
  logits: jax.Array,
  positions: jax.Array,
  sampling: SamplingState,
  *,
  kernels: str = dispatch.REFERENCE,
  sharding: NamedSharding | None = None,
) -> types.Verdict:
  """Verifies a chain, exactly, at any temperature.

  Args:
    proposal: K draft tokens for each row.
    logits: f32[B, K + 1, V] of the target, adjusted.
    positions: i32[B, K + 1] of the tokens that the logits are for.
    sampling: sampling parameters of the rows.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
    sharding: static sharding of any array on the same devices.
  """
  devices = {'kernels': kernels, 'sharding': sharding}
  if proposal.probs is None or sampling.temperatures is None:
    choices = matching.choose(logits, positions, sampling, **devices)
    return matching.verify(proposal, choices)
  return rejection.verify(proposal, logits, positions, sampling, **devices)
