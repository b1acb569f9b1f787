"""The move of kept rows in pages as a Pallas Triton kernel for NVIDIA GPUs.

As in `kv_commit`: one launch for up to 16 layers. Each program takes some
columns of one row in one cache.

Legend: B rows, T places of each, P pages, Z places of a page, C numbers of a
token.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import tiles
from kernels_pallas.kv_commit import pallas_gpu as dense_kernel

Config = dense_kernel.Config
_DEFAULT = Config()


def check(pages: jax.Array, num_kept: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it."""
  tiles.check_pages(pages)
  tiles.check_most(num_kept, dense_kernel.MOST_ROWS, 'rows')


def paged_commit(
  caches: Sequence[jax.Array],
  sources: jax.Array,
  targets: jax.Array,
  *,
  config: Config = _DEFAULT,
  interpret: bool = False,
) -> list[jax.Array]:
  """See `api.paged_commit`; raises NotImplementedError as `check`."""
  shape = caches[0].shape
  check(caches[0], sources.shape[1])
  moved = []
  for i in range(0, len(caches), config.num_caches):
    group = [x.reshape(-1, shape[2]) for x in caches[i : i + config.num_caches]]
    moved += _launch(group, sources, targets, config.num_columns, interpret)
  return [x.reshape(shape) for x in moved]


def _launch(caches, sources, targets, num_columns, interpret):
  shape = caches[0].shape
  whole = pl.BlockSpec(shape, lambda b, c, i: (0, 0))
  of_row = pl.BlockSpec((None, sources.shape[1]), lambda b, c, i: (b, 0))
  return pl.pallas_call(
    functools.partial(_kernel, num_columns=num_columns, interpret=interpret),
    grid=(len(sources), pl.cdiv(shape[1], num_columns), len(caches)),
    in_specs=[of_row, of_row, *[whole] * len(caches)],
    out_specs=[whole] * len(caches),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
    input_output_aliases={2 + i: i for i in range(len(caches))},
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
    name='paged_commit',
  )(sources, targets, *caches)


def _kernel(
  # Inputs:
  sources,  # i32[T]
  targets,  # i32[T]
  *refs,  # twice the caches [P * Z, C]: inputs, and outputs in the same memory
  num_columns: int,
  interpret: bool,
):
  outputs = refs[len(refs) // 2 :]
  num_places, width = outputs[0].shape
  index = jnp.arange(pl.next_power_of_2(sources.shape[0]))
  is_place = index < sources.shape[0]
  source = plgpu.load(sources.at[index], mask=is_place, other=0)
  target = plgpu.load(targets.at[index], mask=is_place, other=num_places)
  column = pl.program_id(1) * num_columns + jnp.arange(num_columns)
  dense_kernel.move_rows(
    outputs,
    source,
    target,
    (target < num_places)[:, None] & (column < width)[None],
    column,
    interpret=interpret,
  )
