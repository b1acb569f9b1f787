"""No speculation: plain autoregressive decoding as a drafter."""

import dataclasses

import jax.numpy as jnp

from swiftspec_jax import drafting, types


@dataclasses.dataclass(frozen=True)
class NoDraft(drafting.StatelessDrafter):
  """Proposes nothing, so that the step needs no special case."""

  num_speculative_tokens: int = dataclasses.field(default=0, init=False)
  lengths: tuple[int, ...] = dataclasses.field(default=(0,), init=False)

  def propose(self, params, state):
    del params
    batch = state.lengths.shape[0]
    proposal = types.Proposal(
      token_ids=jnp.zeros((batch, 0), jnp.int32),
      num_drafted=jnp.zeros((batch,), jnp.int32),
    )
    return proposal, None
