"""Rejection sampling on a chain as a Pallas Triton kernel for NVIDIA GPUs.

One launch: programs share the vocabulary, and the one that ends last puts their
maxima and sums together.

Legend: B rows, T draft tokens and one more place, N places with padding, V
vocabulary, K block_vocab, P programs of a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import last_program
from kernels_pallas.vocabulary import whole_vocabulary

_MAX_PLACES = 64
_MIN_PLACES = 2

Config = whole_vocabulary.GpuConfig
_DEFAULT = Config()
check = functools.partial(whole_vocabulary.check, most_tokens=_MAX_PLACES)


def accept_chain(
  law: jax.Array,
  token_ids: jax.Array,
  bars: jax.Array,
  *,
  config: Config = _DEFAULT,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """See `api.accept_chain`; raises NotImplementedError as `check`."""
  check(law.shape, law.dtype)
  batch, num_places, vocab_size = law.shape
  num_rows = max(pl.next_power_of_2(num_places), _MIN_PLACES)
  num_tiles = pl.cdiv(vocab_size, config.block_vocab)
  num_programs = min(config.num_programs, pl.next_power_of_2(num_tiles))

  def of_row(*shape):
    return pl.BlockSpec((None, *shape), lambda b, p: (b, *(0 for _ in shape)))

  partial = ((num_programs, num_rows), jnp.float32)
  out_shapes = [
    ((1,), jnp.int32),
    ((num_places,), jnp.float32),
    partial,
    partial,
    partial,
  ]
  counters, counter = last_program.counters(batch, lambda b, _: b)
  num_accepted, normalisers, *_ = pl.pallas_call(
    functools.partial(
      _kernel,
      num_tiles=num_tiles,
      block_vocab=config.block_vocab,
      interpret=interpret,
    ),
    grid=(batch, num_programs),
    in_specs=[
      of_row(num_places, vocab_size),
      of_row(num_places),
      of_row(num_places),
      counter,
    ],
    out_specs=[of_row(*shape) for shape, _ in out_shapes],
    out_shape=[
      jax.ShapeDtypeStruct((batch, *shape), dtype)
      for shape, dtype in out_shapes
    ],
    compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
    interpret=interpret,
    name='accept_chain',
  )(law, token_ids, bars, counters)
  return num_accepted[:, 0], normalisers


def _kernel(
  # Inputs:
  law,  # f32[T, V]
  token_ids,  # i32[T]
  bars,  # f32[T]
  num_done,  # i32[1]
  # Outputs:
  num_accepted,  # i32[1]
  normalisers,  # f32[T]
  highest,  # f32[P, N] of the logits of each program
  total,  # f32[P, N] of exp(logit - highest)
  drafted,  # f32[P, N] logit of the draft token, if a program has it
  *,
  num_tiles: int,
  block_vocab: int,
  interpret: bool,
):
  num_places, vocab_size = law.shape
  num_programs, num_rows = highest.shape
  program = pl.program_id(1)
  place = jnp.arange(num_rows)
  is_place = place < num_places
  share = pl.cdiv(num_tiles, num_programs)
  start = program * share
  wanted = plgpu.load(token_ids.at[place], mask=is_place, other=-1)

  def add_tile(tile, carry):
    before, sums, found = carry
    token = tile * block_vocab + jnp.arange(block_vocab)
    values = plgpu.load(
      law.at[place[:, None], token[None]],
      mask=is_place[:, None] & (token < vocab_size)[None],
      other=-jnp.inf,
    )
    now = jnp.maximum(before, values.max(axis=1))
    weights = jnp.exp(values - now[:, None]).sum(axis=1)
    is_wanted = token[None] == wanted[:, None]
    return (
      now,
      sums * jnp.exp(before - now) + weights,
      jnp.maximum(found, jnp.where(is_wanted, values, -jnp.inf).max(axis=1)),
    )

  # Finite, so that excluded tokens have weight 0 before any other was seen.
  lowest = jnp.full((num_rows,), jnp.finfo(jnp.float32).min)
  highest[program], total[program], drafted[program] = jax.lax.fori_loop(
    start,
    jnp.minimum(start + share, num_tiles),
    add_tile,
    (lowest, jnp.zeros_like(lowest), jnp.full_like(lowest, -jnp.inf)),
  )

  @pl.when(last_program.is_last(num_done, num_programs, interpret=interpret))
  def _():
    all_highest = highest[...]
    best = all_highest.max(axis=0)
    sums = total[...] * jnp.exp(all_highest - best[None])
    normaliser = best + jnp.log(sums.sum(axis=0))
    plgpu.store(normalisers.at[place], normaliser, mask=is_place)
    bar = plgpu.load(bars.at[place], mask=is_place, other=jnp.inf)
    stands = bar < jnp.exp(drafted[...].max(axis=0) - normaliser)
    # The last place has no draft token, so there is one that does not stand.
    num_accepted[0] = jnp.where(stands, num_rows, place).min()
