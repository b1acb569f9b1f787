"""Product and all-reduce as one Pallas kernel for the TensorCores of TPUs.

Each device multiplies its rows of the weight, one tile of columns after the
other. A tile's partial sums leave for all other devices at once, while the next
tile is multiplied; after the last one, every device adds what has come. For
few tokens this costs one latency of the links, where a ring has 2 (P - 1). The
price is that each device sends P - 1 times its sums.

All devices add the same rounded numbers in the same order, so that what they
hold is equal, bit for bit.

Legend: N tokens, K inputs of a device, D outputs, C columns of a tile, P
devices.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import products, tiles

_MOST_TOKENS = 32
_PART_BYTES = 6 * 2**20  # of the parts in VMEM
_BLOCK_BYTES = 2 * 2**20  # of a tile of the weight, of which two are in VMEM
_COLLECTIVE_ID = 0


def check(x: jax.Array, num_outputs: int, num_devices: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it.

  Args:
    x: [N, K], the share of a device.
    num_outputs: D.
    num_devices: P.
  """
  num_tokens = x.shape[0]
  products.check_dtype(x.dtype)
  tiles.check_most(num_tokens, _MOST_TOKENS, 'tokens')
  num_bytes = num_devices * num_tokens * num_outputs * x.dtype.itemsize
  if num_bytes > _PART_BYTES:
    raise NotImplementedError(
      f'the sums of {num_devices} devices are {num_bytes} bytes, more than '
      f'{_PART_BYTES}'
    )


def matmul_all_reduce(
  x: jax.Array,
  weight: jax.Array,
  *,
  axis_name: str,
  num_devices: int,
) -> jax.Array:
  """Returns the sum over devices of x [N, K] times weight [K, D].

  Called on each device, within `jax.shard_map`. Raises NotImplementedError
  where `check` does.

  Args:
    x: the device's share of the inputs.
    weight: the device's rows of the weight.
    axis_name: name of the axis of the mesh over which the sum goes.
    num_devices: number of devices along that axis.
  """
  check(x, weight.shape[1], num_devices)
  num_tokens, num_inputs = x.shape
  num_outputs = weight.shape[1]
  fitting = _BLOCK_BYTES // (num_inputs * weight.dtype.itemsize)
  columns = tiles.whole_lanes(num_outputs, max(fitting, tiles.LANES))
  return pl.pallas_call(
    functools.partial(
      _kernel, axis_name=axis_name, num_devices=num_devices, columns=columns
    ),
    grid=(num_outputs // columns,),
    in_specs=[
      pl.BlockSpec(x.shape, lambda d: (0, 0)),
      pl.BlockSpec((num_inputs, columns), lambda d: (0, d)),
    ],
    out_specs=pl.BlockSpec((num_tokens, num_outputs), lambda d: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((num_tokens, num_outputs), x.dtype),
    scratch_shapes=[
      pltpu.VMEM((num_devices, num_tokens, num_outputs), x.dtype),
      pltpu.SemaphoreType.DMA((num_devices,)),
      pltpu.SemaphoreType.DMA((num_devices,)),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('arbitrary',), collective_id=_COLLECTIVE_ID
    ),
    name='matmul_all_reduce',
  )(x, weight)


def _kernel(
  # Inputs:
  x,  # [N, K]
  weight,  # [K, C]
  # Output:
  out,  # [N, D]
  # Scratch:
  parts,  # [P, N, D] of each device
  sent,  # [P] semaphores, by distance
  arrived,  # [P] semaphores, by sender
  *,
  axis_name: str,
  num_devices: int,
  columns: int,
):
  tile = pl.program_id(0)
  me = jax.lax.axis_index(axis_name)
  distances = range(1, num_devices)

  def device(distance):
    return jax.lax.rem(me + distance, num_devices)

  def send(distance, place):
    """A copy of this device's sums to the same place of another one."""
    return pltpu.make_async_remote_copy(
      parts.at[place],
      parts.at[place],
      sent.at[distance],
      arrived.at[place[0]],
      device_id={axis_name: device(distance)},
    )

  @pl.when(tile == 0)
  def _():
    for distance in distances:
      pl.semaphore_signal(
        pltpu.get_barrier_semaphore(), device_id={axis_name: device(distance)}
      )

  where = me, slice(None), _columns_of(tile, columns, out.shape[1])
  parts[where] = products.dot(x[...], weight[...]).astype(parts.dtype)

  @pl.when(tile == 0)
  def _():
    # Nobody may write to a device that still uses its memory for what came
    # before.
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), num_devices - 1)

  for distance in distances:
    send(distance, where).start()

  @pl.when(tile == pl.num_programs(0) - 1)
  def _():
    for distance in distances:
      # Semaphores count bytes: one wait is for all tiles.
      send(distance, (me,)).wait_send()
      send(distance, (device(distance),)).wait_recv()
    total = parts[0].astype(jnp.float32)
    for sender in distances:
      total += parts[sender].astype(jnp.float32)
    out[...] = total.astype(out.dtype)


def _columns_of(tile, columns, num_outputs):
  if columns == num_outputs:
    return slice(None)  # need not be whole lanes
  return pl.ds(pl.multiple_of(tile * columns, columns), columns)
