"""Thresholds of top-k and top-p as a Pallas kernel for the TensorCore of a TPU.

One launch reads the logits once. Their keys stay in VMEM, and after the last
tile of a row come the 32 steps of each search, all over VMEM.

Eight rows lie below each other; where their number is no multiple of that, one
row alone is cut into eight parts, so that registers are full in any case.

Legend: N rows of all queries, V vocabulary, G groups of rows, R rows of a
group (8 or 1), K block_vocab, C columns in VMEM, W width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tiles
from kernels_pallas.thresholds import exact

_SUBLANES = 8
_SPARE_BYTES = 4 * 2**20  # of VMEM, for tiles and what the compiler needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # Tokens of a tile.
  block_vocab: int = tiles.number(
    (8192, 16_384, 32_768), 8192, multiple=_SUBLANES * tiles.LANES
  )
  # Columns that are added up side by side, which divides an eighth of
  # `block_vocab`.
  width: int = tiles.number((256, 512, 1024, 2048), 1024, multiple=tiles.LANES)

  def __post_init__(self):
    super().__post_init__()
    if self.block_vocab // _SUBLANES % self.width:
      raise ValueError(
        f'width={self.width} must divide an eighth of {self.block_vocab}'
      )


check = exact.check


def find_thresholds(
  logits: jax.Array,
  top_ks: jax.Array | None,
  top_ps: jax.Array | None,
  *,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """See `api.find_thresholds`; raises NotImplementedError as `check`."""
  check(logits)
  batch, num_queries, vocab_size = logits.shape
  num_rows = batch * num_queries
  num_together = 1 if num_rows % _SUBLANES else _SUBLANES
  num_groups = num_rows // num_together
  num_tiles = pl.cdiv(vocab_size, config.block_vocab)
  num_columns = num_tiles * config.block_vocab * num_together // _SUBLANES
  num_scratch = 1 if top_ps is None else 2

  def of_queries(values):
    goals = jnp.repeat(values.astype(jnp.float32), num_queries)
    return goals.reshape(num_groups, num_together, 1)

  goals = [of_queries(x) for x in (top_ks, top_ps) if x is not None]
  column = pl.BlockSpec((None, num_together, 1), lambda g, v: (g, 0, 0))
  scratch = pltpu.VMEM((_SUBLANES, num_columns), jnp.int32)
  found = pl.pallas_call(
    functools.partial(
      _kernel,
      vocab_size=vocab_size,
      width=config.width,
      has_top_k=top_ks is not None,
      has_top_p=top_ps is not None,
    ),
    grid=(num_groups, num_tiles),
    in_specs=[
      pl.BlockSpec(
        (None, num_together, config.block_vocab), lambda g, v: (g, 0, v)
      ),
      *[column] * len(goals),
    ],
    out_specs=column,
    out_shape=jax.ShapeDtypeStruct((num_groups, num_together, 1), jnp.float32),
    scratch_shapes=[scratch] * num_scratch,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=4 * _SUBLANES * num_columns * num_scratch + _SPARE_BYTES,
    ),
    interpret=interpret,
    name='find_thresholds',
  )(logits.reshape(num_groups, num_together, vocab_size), *goals)
  return found.reshape(batch, num_queries)


def _kernel(
  logits,  # f32[R, K]
  *refs,  # goals f32[R, 1], thresholds f32[R, 1], keys and weights i32[8, C]
  vocab_size: int,
  width: int,
  has_top_k: bool,
  has_top_p: bool,
):
  num_goals = has_top_k + has_top_p
  goals, (thresholds, keys, *weights) = refs[:num_goals], refs[num_goals:]
  tile = pl.program_id(1)
  _store_tile(logits, keys, tile, vocab_size)

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    # Over a row: its columns, and its parts if it lies in several.
    axes = (1,) if logits.shape[0] == _SUBLANES else (1, 0)
    fold = functools.partial(_fold, width=width, size=keys.shape[1])
    least = jnp.full(thresholds.shape, exact.LEAST, jnp.int32)
    if has_top_k:

      def count(candidates):
        def add(place, carry):
          is_kept = keys[:, place] >= candidates
          return (carry[0] + jnp.where(is_kept, 1, 0),)

        (counts,) = fold(add, (0,))
        for axis in axes:
          counts = counts.sum(axis=axis, keepdims=True)
        return counts.astype(jnp.float32)

      least = exact.search(count, goals[0][...])
    if has_top_p:
      total = _weigh(keys, weights[0], least, fold, axes)

      def measure(candidates):
        return _add_up(keys, weights[0], candidates, fold, axes)

      found = exact.search(measure, goals[-1][...] * total)
      least = jnp.maximum(least, found)
    thresholds[...] = exact.logits_of(least)


def _store_tile(logits, keys, tile, vocab_size):
  """Keeps the keys of a tile; after the vocabulary those of -inf."""
  num_rows, block = logits.shape
  token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + tile * block
  inside = jnp.where(token < vocab_size, logits[...], -jnp.inf)
  found = exact.keys_of(inside)
  columns = block * num_rows // _SUBLANES
  place = pl.ds(pl.multiple_of(tile * columns, columns), columns)
  for part in range(_SUBLANES // num_rows):
    keys[pl.ds(part * num_rows, num_rows), place] = found[
      :, part * columns : (part + 1) * columns
    ]


def _fold(add, start, *, width, size):
  """Returns what `add` makes of all columns, i32[8, W] for each start."""

  def body(i, carry):
    return add(pl.ds(pl.multiple_of(i * width, width), width), carry)

  carry = tuple(jnp.full((_SUBLANES, width), s, jnp.int32) for s in start)
  return jax.lax.fori_loop(0, size // width, body, carry)


def _weigh(keys, weights, least, fold, axes):
  """Stores the weights of keys from `least` on, and returns their sum."""

  def find_highest(place, carry):
    return (jnp.maximum(carry[0], keys[:, place]),)

  (highest,) = fold(find_highest, (exact.LEAST,))
  for axis in axes:
    highest = highest.max(axis=axis, keepdims=True)
  highest = exact.logits_of(highest)

  @pl.loop(0, keys.shape[1] // tiles.LANES)
  def _(i):
    place = pl.ds(pl.multiple_of(i * tiles.LANES, tiles.LANES), tiles.LANES)
    found = exact.weights_of(exact.logits_of(keys[:, place]), highest)
    weights[:, place] = jnp.where(keys[:, place] >= least, found, 0)

  return _add_up(keys, weights, least, fold, axes)


def _add_up(keys, weights, candidates, fold, axes):
  """Returns the sum f32[R, 1] of weights of keys from candidates on."""

  def add(place, carry):
    is_kept = keys[:, place] >= candidates
    limbs = exact.limbs_of(jnp.where(is_kept, weights[:, place], 0))
    return tuple(c + limb for c, limb in zip(carry, limbs, strict=True))

  return exact.add_up(*fold(add, (0, 0)), axes, keepdims=True)
