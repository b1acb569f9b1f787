"""The move of kept cache rows as a Pallas kernel for the TensorCore of a TPU.

One launch for all layers. The rows after the prefix, in whole tiles, come to
VMEM, from several caches at once. There they are moved by a product with a
matrix that has a single one for each row, which is exact, and go back to
their places.

XLA keeps a cache whose head_dim does not fill the lanes with its rows on the
lanes. The kernel then takes it in that order, as tree attention does.

Legend: B rows, T rows to keep, W rows of the window, S cache capacity, G kv
heads, E head_dim, A caches in VMEM at once.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import products, tiles

_SUBLANES = 16  # of the narrowest dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  # Most bytes of all windows in VMEM; a single window may be larger.
  window_bytes: int = tiles.number((2**20, 2**21, 2**22, 2**23), 4 * 2**20)


def check(cache: jax.Array, num_rows: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  _, _, capacity, head_dim = cache.shape
  tiles.check_multiple(head_dim, 64, 'numbers of a head')
  tile = _tile(head_dim)
  if capacity % tile or _window(num_rows, tile) > capacity:
    raise NotImplementedError(
      f'{num_rows} rows do not lie in whole tiles of {capacity}'
    )


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
  config: Config = Config(),
  interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
  """See `api.kv_commit`; raises NotImplementedError as `check`."""
  check(caches[0], num_rows)
  batch, num_kv_heads, capacity, head_dim = caches[0].shape
  dtype, tile = caches[0].dtype, _tile(head_dim)
  num_window = _window(num_rows, tile)
  firsts = jnp.minimum(starts // tile * tile, capacity - num_window)
  sources = _sources(starts - firsts, path, num_window)
  rows_axis = 1 if tile == _SUBLANES else 2
  window = (num_kv_heads, num_window, head_dim)
  if rows_axis == 2:
    caches = [jnp.swapaxes(cache, 2, 3) for cache in caches]
    window = (num_kv_heads, head_dim, num_window)
  sources = jnp.expand_dims(sources, 3 - rows_axis)
  window_bytes = num_kv_heads * num_window * head_dim * dtype.itemsize
  num_at_once = min(max(config.window_bytes // window_bytes, 1), len(caches))
  in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(caches)
  moved = pl.pallas_call(
    functools.partial(_kernel, rows_axis=rows_axis, num_rows=num_rows),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch,),
      in_specs=[
        pl.BlockSpec((None, *sources.shape[1:]), lambda b, *_: (b, 0, 0)),
        *in_hbm,
      ],
      out_specs=in_hbm,
      scratch_shapes=[
        pltpu.VMEM((num_at_once, *window), dtype),
        pltpu.SemaphoreType.DMA((num_at_once,)),
      ],
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
    input_output_aliases={3 + i: i for i in range(len(caches))},
    interpret=interpret,
    name='kv_commit',
  )(starts, firsts, sources, *caches)
  if rows_axis == 2:
    moved = [jnp.swapaxes(cache, 2, 3) for cache in moved]
  return list(moved)


def _tile(head_dim: int) -> int:
  """Returns how many rows of a cache lie together."""
  return tiles.LANES if head_dim % tiles.LANES else _SUBLANES


def _window(num_rows: int, tile: int) -> int:
  """Returns W: whole tiles that hold the rows, wherever they begin."""
  return pl.cdiv(num_rows + tile - 1, tile) * tile


def _sources(starts, path, num_window):
  """Returns which row i32[B, W] of its window each one becomes."""
  row = jnp.arange(num_window, dtype=jnp.int32)[None]
  place = row - starts[:, None]
  last = path.shape[1] - 1
  kept = jnp.take_along_axis(path, jnp.clip(place, 0, last), axis=1)
  is_moved = (place >= 0) & (place <= last)
  return jnp.where(is_moved, starts[:, None] + kept, row)


def _kernel(
  # Prefetched scalars:
  starts,  # i32[B]
  firsts,  # i32[B] of the windows
  # Inputs, outputs, scratch:
  sources,  # i32[W, 1], with rows on the lanes i32[1, W]
  *refs,  # the caches in HBM as inputs and as outputs, windows, semaphores
  rows_axis: int,
  num_rows: int,
):
  # Caches are [B, G, S, E] or [B, G, E, S], windows [A, G, W, E] or
  # [A, G, E, W].
  *caches, windows, semaphores = refs
  caches = caches[len(caches) // 2 :]
  row, num_window = pl.program_id(0), windows.shape[1 + rows_axis]
  tile = _SUBLANES if rows_axis == 1 else tiles.LANES
  first = pl.multiple_of(firsts[row], tile)
  rows = pl.ds(first, num_window)
  place = (row, slice(None), *(slice(None),) * (rows_axis - 1), rows)
  num_at_once = windows.shape[0]
  for i in range(0, len(caches), num_at_once):
    group = caches[i : i + num_at_once]
    pairs = [(cache.at[place], windows.at[k]) for k, cache in enumerate(group)]
    _copy(pairs, semaphores)

    @pl.loop(0, len(group))
    def _(k):
      _move(
        windows.at[k],
        sources[...],
        starts[row] - first,
        rows_axis=rows_axis,
        num_rows=num_rows,
      )

    _copy([(window, place) for place, window in pairs], semaphores)


def _copy(pairs, semaphores):
  """Copies the first of each pair to the second, all at once."""
  copies = [
    pltpu.make_async_copy(source, target, semaphores.at[k])
    for k, (source, target) in enumerate(pairs)
  ]
  for copy in copies:
    copy.start()
  for copy in copies:
    copy.wait()


def _move(window, sources, start, *, rows_axis, num_rows):
  """Moves the rows of one window [G, W, E] or [G, E, W]."""
  rows_axis -= 1  # of a head
  row = jax.lax.broadcasted_iota(jnp.int32, sources.shape, rows_axis)
  # What lies elsewhere may be no number.
  may_move = (row >= start) & (row < start + num_rows)
  size = sources.shape[rows_axis]
  other = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1 - rows_axis)
  ones = jnp.where(sources == other, 1.0, 0.0).astype(window.dtype)
  for head in range(window.shape[0]):
    old = window[head]
    clean = jnp.where(may_move, old, jnp.zeros_like(old))
    pair = (ones, clean) if rows_axis == 0 else (clean, ones)
    new = products.dot(*pair)
    window[head] = jnp.where(sources != row, new.astype(old.dtype), old)
