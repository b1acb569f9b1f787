"""Thresholds of top-k and top-p by what suits devices and shape.

Legend: B rows, T query tokens, V vocabulary.
"""

import jax
from jax.sharding import Sharding

from kernels_pallas.vocabulary import vocabulary_dispatch


def find_thresholds(
  logits: jax.Array,
  top_ks: jax.Array | None,
  top_ps: jax.Array | None,
  *,
  implementation: str = 'auto',
  sharding: Sharding | None = None,
) -> jax.Array:
  """Returns the least logit with which a token stays in the distribution.

  Top-k comes first: it keeps the tokens of the highest logits, as few as make
  at least `top_ks`. Top-p then keeps the most probable of these, as few as make
  at least `top_ps` of their probability. Tokens of equal logits stay or go
  together. All implementations decide alike, bit for bit: probabilities are
  integers, see `exact`.

  Args:
    logits: f32[B, T, V], divided by the temperature; not NaN.
    top_ks: i32[B] least numbers of tokens; V or more keeps all, as None does.
    top_ps: f32[B] least shares of probability, larger than 0; infinity keeps
      all, as None does. They are kept within 2e-5. If nearly all tokens have
      less than 2**-30 of the highest probability, V * 2**-30 is added to that.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.

  Returns:
    f32[B, T]; -inf where all stay.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  wanted = [
    name
    for name, values in (('top-k', top_ks), ('top-p', top_ps))
    if values is not None
  ]
  call = vocabulary_dispatch.choose(
    'find_thresholds',
    implementation,
    sharding,
    logits,
    f'logits {logits.dtype}{list(logits.shape)}, {" and ".join(wanted)},',
    has_top_k=top_ks is not None,
    has_top_p=top_ps is not None,
  )
  return call(logits, top_ks, top_ps)
