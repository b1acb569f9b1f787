"""Product and all-reduce on GPUs that one NVLink switch joins (Hopper and on).

XLA multiplies. The parts are added by the all-reduce for Mosaic GPU that comes
with JAX: each device reads, through the switch, the sum of all, which costs one
latency of the links. So nobody has to trust an exchange of ours, which nothing
without several GPUs can run.

Legend: N tokens, K inputs of a device, D outputs.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import reduce_scatter_mgpu

from kernels_pallas import products

# Numbers that a program adds at once: 128 threads, 16 bytes each, twice.
_TILE = 1024
_MOST_PROGRAMS = 128  # all of them must run together


def check(mesh_size: int, num_devices: int) -> None:
  """Raises NotImplementedError with the reason if the kernel cannot do it.

  Args:
    mesh_size: number of devices of the mesh.
    num_devices: number of devices that share the weight.
  """
  if mesh_size != num_devices:
    raise NotImplementedError(
      f'{num_devices} devices of {mesh_size} share the weight, and this adds '
      'the parts of all'
    )


def matmul_all_reduce(
  x: jax.Array, weight: jax.Array, *, axis_names: tuple[str, ...]
) -> jax.Array:
  """Returns the sum over devices of x [N, K] times weight [K, D]: [N, D].

  To be called on each device (`jax.shard_map`).

  Args:
    x: bfloat16 or float32[N, K], of the device.
    weight: [K, D], of the device.
    axis_names: all axes of the mesh.
  """
  # Rounded as in the other implementations, and added in float32.
  part = products.multiply(x, weight)
  flat = part.astype(jnp.float32).reshape(-1)
  flat = jnp.pad(flat, (0, -part.size % _TILE))
  total = reduce_scatter_mgpu.reduce_scatter(
    flat,
    axis_name=axis_names,
    scatter_dimension=None,
    num_blocks=min(flat.size // _TILE, _MOST_PROGRAMS),
    tile_size=_TILE,
  )
  return total[: part.size].reshape(part.shape).astype(x.dtype)
