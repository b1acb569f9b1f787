"""The move of kept cache rows as a Pallas kernel for the TensorCore of a TPU.

One launch for all layers. The rows behind the prefix, in whole tiles, come to
VMEM, from several caches at once; there they are moved one by one, and go
back to their places.

Legend: B rows, T rows to keep, W rows of the window, S cache capacity, G kv
heads, E head_dim, A caches in VMEM at once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_TILE = 16  # rows of a tile of the narrowest dtype
_WINDOW_BYTES = 4 * 2**20  # of all windows in VMEM


def check(cache_shape: tuple[int, ...], num_rows: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  _, _, capacity, head_dim = cache_shape
  if head_dim % _LANES:
    raise NotImplementedError(
      f'XLA keeps caches of head_dim {head_dim} with their rows on the lanes'
    )
  if capacity % _TILE or _window(num_rows) > capacity:
    raise NotImplementedError(
      f'{num_rows} rows do not lie in whole tiles of {capacity}'
    )


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
  interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
  """See `api.kv_commit`; raises NotImplementedError as `check`."""
  check(caches[0].shape, num_rows)
  batch, num_kv_heads, _, head_dim = caches[0].shape
  dtype = caches[0].dtype
  window = (num_kv_heads, _window(num_rows), head_dim)
  window_bytes = num_kv_heads * window[1] * head_dim * dtype.itemsize
  num_at_once = min(max(_WINDOW_BYTES // window_bytes, 1), len(caches))
  in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(caches)
  return pl.pallas_call(
    _kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch,),
      in_specs=in_hbm,
      out_specs=in_hbm,
      scratch_shapes=[
        pltpu.VMEM((num_at_once, *window), dtype),
        pltpu.VMEM(window, jnp.float32),
        pltpu.VMEM(window, jnp.float32),
        pltpu.SemaphoreType.DMA((num_at_once,)),
      ],
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
    input_output_aliases={2 + i: i for i in range(len(caches))},
    interpret=interpret,
    name='kv_commit',
  )(starts, path, *caches)


def _window(num_rows: int) -> int:
  """Returns W: whole tiles that hold the rows, wherever they begin."""
  return pl.cdiv(num_rows + _TILE - 1, _TILE) * _TILE


def _kernel(
  # Prefetched scalars:
  starts,  # i32[B]
  path,  # i32[B, T]
  # Inputs, outputs, scratch:
  *refs,  # twice the caches [B, G, S, E] in HBM; then as below
):
  *caches, windows, old, new, semaphores = refs
  # windows [A, G, W, E]; old, new f32[G, W, E] of one; semaphores [A]
  caches = caches[len(caches) // 2 :]
  row, num_rows = pl.program_id(0), windows.shape[2]
  tile = jax.lax.div(starts[row], _TILE)
  last_tile = (caches[0].shape[2] - num_rows) // _TILE
  first = pl.multiple_of(jnp.minimum(tile, last_tile) * _TILE, _TILE)
  start = starts[row] - first
  num_at_once = windows.shape[0]

  for i in range(0, len(caches), num_at_once):
    group = caches[i : i + num_at_once]
    pairs = [
      (cache.at[row, :, pl.ds(first, num_rows)], windows.at[k])
      for k, cache in enumerate(group)
    ]
    _copy(pairs, semaphores)

    @pl.loop(0, len(group))
    def _(k):
      _move(windows.at[k], old, new, path.at[row], start)

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


def _move(window, old, new, path, start):
  """Moves the rows of one window [G, W, E]; `old` and `new` are scratch."""
  # Single rows can be addressed where each has a register's row to itself.
  old[...] = window[...].astype(jnp.float32)
  new[...] = old[...]
  last = window.shape[1] - 1

  @pl.loop(0, path.shape[0])
  def _(i):
    source = pl.ds(jnp.clip(start + path[i], 0, last), 1)
    new[:, pl.ds(jnp.minimum(start + i, last), 1)] = old[:, source]

  window[...] = new[...].astype(window.dtype)
