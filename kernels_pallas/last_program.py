"""Work that the last of several programs does, for Pallas Triton kernels."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


def is_last(num_done, num_programs: int, *, interpret: bool) -> jax.Array:
  """Counts this program; returns bool[], whether all others have counted.

  If so, what the others stored before they counted is visible. The count
  releases and acquires at the scope of the device, and barriers before and
  after it order the other threads of a program. The counter must be zero at
  the launch: an input of zeros, aliased to the output.

  Args:
    num_done: i32[1] counter that the programs share.
    num_programs: number of programs that share the counter.
    interpret: whether the interpreter runs the programs. It runs one after
      the other and has no barrier.
  """
  if not interpret:
    # All threads have stored before one of them counts.
    plgpu.debug_barrier()
  zero = jnp.zeros((), jnp.int32)
  return plgpu.atomic_add(num_done, zero, zero + 1) == num_programs - 1
