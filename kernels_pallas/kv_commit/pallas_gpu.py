"""The move of kept cache rows as a Pallas Triton kernel for NVIDIA GPUs.

One launch for up to 16 layers. Each program takes some columns of one kv head
in one cache, reads all rows to keep and then writes them.

Legend: B rows, T rows to keep, S cache capacity, G kv heads, E head_dim, C
columns of a program.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import tiles

MOST_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(tiles.Config):
  """Tiles of the kernel."""

  num_columns: int = tiles.power((32, 64, 128), 64)  # most columns of a program
  # Most caches of a launch. The time to compile grows faster than this
  # number.
  num_caches: int = tiles.number((16, 32), 32)


def check(cache: jax.Array, num_rows: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check_head_dim(cache.shape[3])
  tiles.check_most(num_rows, MOST_ROWS, 'rows')


def kv_commit(
  caches: Sequence[jax.Array],
  starts: jax.Array,
  path: jax.Array,
  *,
  num_rows: int,
  config: Config = Config(),
  interpret: bool = False,
) -> list[jax.Array]:
  """See `api.kv_commit`; raises NotImplementedError as `check`."""
  check(caches[0], num_rows)
  moved = []
  for i in range(0, len(caches), config.num_caches):
    group = caches[i : i + config.num_caches]
    moved += _launch(group, starts, path, config.num_columns, interpret)
  return moved


def _launch(caches, starts, path, num_columns, interpret):
  batch, num_kv_heads, capacity, head_dim = caches[0].shape
  columns = min(head_dim, num_columns)
  num_parts = head_dim // columns
  part = pl.BlockSpec(
    (None, None, capacity, columns),
    lambda b, h, c: (b, h // num_parts, 0, h % num_parts),
  )
  return pl.pallas_call(
    functools.partial(_kernel, interpret=interpret),
    grid=(batch, num_kv_heads * num_parts, len(caches)),
    in_specs=[
      pl.BlockSpec((None,), lambda b, h, c: (b,)),
      pl.BlockSpec((None, path.shape[1]), lambda b, h, c: (b, 0)),
      *[part] * len(caches),
    ],
    out_specs=[part] * len(caches),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
    input_output_aliases={2 + i: i for i in range(len(caches))},
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
    name='kv_commit',
  )(starts, path, *caches)


def _kernel(
  # Inputs:
  start,  # i32[]
  path,  # i32[T]
  *refs,  # twice the caches [S, C]: inputs, and outputs in the same memory
  interpret: bool,
):
  outputs = refs[len(refs) // 2 :]
  capacity, num_columns = outputs[0].shape
  index = jnp.arange(pl.next_power_of_2(path.shape[0]))
  is_kept = index < path.shape[0]
  offset = plgpu.load(path.at[index], mask=is_kept, other=0)
  source = jnp.minimum(start[()] + offset, capacity - 1)
  target = start[()] + index
  is_moved = (is_kept & (offset != index) & (target < capacity))[:, None]
  column = jnp.arange(num_columns)
  move_rows(outputs, source, target, is_moved, column, interpret=interpret)


def move_rows(
  outputs: Sequence[jax.Array],
  source: jax.Array,
  target: jax.Array,
  is_moved: jax.Array,
  column: jax.Array,
  *,
  interpret: bool,
) -> None:
  """Moves rows of the cache that the third index of a program names.

  Args:
    outputs: caches [rows, columns], references of a kernel.
    source: i32[T] rows to read, all before any is written.
    target: i32[T] rows to write.
    is_moved: bool[T, columns], or as wide as one of them, which numbers are.
    column: i32[columns].
    interpret: whether the kernel is interpreted.
  """
  for i, cache in enumerate(outputs):

    @pl.when(pl.program_id(2) == i)
    def _(cache=cache):
      rows = plgpu.load(cache.at[source[:, None], column[None]], mask=is_moved)
      if not interpret:
        # All threads have read before one of them writes.
        plgpu.debug_barrier()
      plgpu.store(cache.at[target[:, None], column[None]], rows, mask=is_moved)
