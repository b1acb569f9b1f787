"""Rejection sampling on a chain in plain JAX: what the kernels follow.

Legend: B rows, T draft tokens and one more place, V vocabulary.
"""

import jax
import jax.numpy as jnp

# By dtype, of the largest number of a result: implementations add up in
# different orders. Other dtypes must be equal.
TOLERANCES = {'float32': 2**-20}


def accept_chain(
  law: jax.Array, token_ids: jax.Array, bars: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Counts the draft tokens that stand.

  The arguments are those of `api.accept_chain`.
  """
  # No probability but those of draft tokens is written to memory.
  normalisers = jax.nn.logsumexp(law, axis=-1)
  index = jnp.maximum(token_ids, 0)[:, :, None]
  drafted = jnp.take_along_axis(law, index, axis=2)[:, :, 0]
  stands = bars < jnp.exp(drafted - normalisers)
  return jnp.argmin(stands, axis=1).astype(jnp.int32), normalisers
