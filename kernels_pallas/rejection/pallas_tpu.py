"""Rejection sampling on a chain as a Pallas kernel for the TensorCore of a TPU.

One launch: the logits are read once in tiles of the vocabulary, whose maxima
and sums are kept as in a running softmax.

Legend: B rows, T draft tokens and one more place, V vocabulary, K block_vocab.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.vocabulary import whole_vocabulary

_MAX_PLACES = 128

Config = whole_vocabulary.TpuConfig
_DEFAULT = Config()
check = functools.partial(whole_vocabulary.check, most_tokens=_MAX_PLACES)


def accept_chain(
  law: jax.Array,
  token_ids: jax.Array,
  bars: jax.Array,
  *,
  config: Config = _DEFAULT,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
  """See `api.accept_chain`; raises NotImplementedError as `check`."""
  check(law.shape, law.dtype)
  batch, num_places, vocab_size = law.shape
  block = config.block_vocab
  column = pl.BlockSpec((None, num_places, 1), lambda b, v: (b, 0, 0))
  num_accepted, normalisers = pl.pallas_call(
    functools.partial(_kernel, vocab_size=vocab_size),
    grid=(batch, pl.cdiv(vocab_size, block)),
    in_specs=[
      pl.BlockSpec((None, num_places, block), lambda b, v: (b, 0, v)),
      column,
      column,
    ],
    out_specs=[pl.BlockSpec((None, 1, 1), lambda b, v: (b, 0, 0)), column],
    out_shape=[
      jax.ShapeDtypeStruct((batch, 1, 1), jnp.int32),
      jax.ShapeDtypeStruct((batch, num_places, 1), jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM((num_places, 1), jnp.float32)] * 3,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    interpret=interpret,
    name='accept_chain',
  )(law, token_ids[:, :, None], bars[:, :, None])
  return num_accepted[:, 0, 0], normalisers[:, :, 0]


def _kernel(
  # Inputs:
  law,  # f32[T, K]
  token_ids,  # i32[T, 1]
  bars,  # f32[T, 1]
  # Outputs:
  num_accepted,  # i32[1, 1]
  normalisers,  # f32[T, 1]
  # Scratch:
  highest,  # f32[T, 1] of the logits so far
  total,  # f32[T, 1] of exp(logit - highest)
  drafted,  # f32[T, 1] logit of the draft token
  *,
  vocab_size: int,
):
  tile = pl.program_id(1)

  @pl.when(tile == 0)
  def _():
    # Finite, so that excluded tokens have weight 0 before any other was seen.
    highest[...] = jnp.full_like(highest, jnp.finfo(jnp.float32).min)
    total[...] = jnp.zeros_like(total)
    drafted[...] = jnp.full_like(drafted, -jnp.inf)

  token = jax.lax.broadcasted_iota(jnp.int32, law.shape, 1)
  token += tile * law.shape[1]
  inside = jnp.where(token < vocab_size, law[...], -jnp.inf)
  before = highest[...]
  highest[...] = jnp.maximum(before, inside.max(axis=1, keepdims=True))
  weights = jnp.exp(inside - highest[...]).sum(axis=1, keepdims=True)
  total[...] = total[...] * jnp.exp(before - highest[...]) + weights
  found = jnp.where(token == token_ids[...], inside, -jnp.inf)
  drafted[...] = jnp.maximum(drafted[...], found.max(axis=1, keepdims=True))

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    normaliser = highest[...] + jnp.log(total[...])
    normalisers[...] = normaliser
    stands = bars[...] < jnp.exp(drafted[...] - normaliser)
    place = jax.lax.broadcasted_iota(jnp.int32, bars.shape, 0)
    # The last place has no draft token, so there is one that does not stand.
    num_accepted[...] = jnp.where(stands, bars.shape[0], place).min(
      axis=0, keepdims=True
    )
