"""Rejection sampling on a chain by what suits devices and shape.

Legend: B rows, T draft tokens and one more place, V vocabulary.
"""

import jax
from jax.sharding import Sharding

from kernels_pallas.rejection import arg_specs
from kernels_pallas.vocabulary import vocabulary_dispatch


def accept_chain(
  law: jax.Array,
  token_ids: jax.Array,
  bars: jax.Array,
  *,
  implementation: str = 'auto',
  sharding: Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Counts the draft tokens that stand (Leviathan et al., arXiv 2211.17192).

  A token stands if those before it do and the target's probability of it is
  larger than its bar: a uniform number times the draft's probability. The
  token behind them is drawn by the caller, at one place of each row.

  Implementations add up probabilities in different orders. Where a bar is
  within rounding of a probability they may decide otherwise.

  Args:
    law: f32[B, T, V] logits of the target's distribution; none of all -inf.
    token_ids: i32[B, T] draft tokens; anything where there is none.
    bars: f32[B, T] bars of these tokens; infinity where there is no draft
      token, as in the last place.
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.

  Returns:
    Number of tokens that stand i32[B], and the logarithms f32[B, T] of the sums
    of exp(law): distribution minus these are log-probabilities.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  batch_size, num_tokens, vocab_size = law.shape
  spec = arg_specs.ArgSpec(
    name=f'law {law.dtype}{list(law.shape)}',
    batch_size=batch_size,
    num_tokens=num_tokens,
    vocab_size=vocab_size,
  )
  call = vocabulary_dispatch.choose(
    'accept_chain',
    implementation,
    sharding,
    spec,
    law.dtype,
  )
  return call(law, token_ids, bars)
