"""Work that the last of several programs does, for Pallas Triton kernels."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


def is_last(num_done, num_programs: int, *, interpret: bool) -> jax.Array:
  """Counts this program; returns bool[], whether all others have counted.

  What they stored before is then visible. The counter must be zero at the
  launch: an input of zeros, aliased to the output.

  Args:
    num_done: i32[1] counter that the programs share.
    num_programs: that count.
    interpret: the interpreter runs one program after the other and has no
      barrier.
  """
  if not interpret:
    # All threads have stored before one of them counts.
    plgpu.debug_barrier()
  zero = jnp.zeros((), jnp.int32)
  return plgpu.atomic_add(num_done, zero, zero + 1) == num_programs - 1


def load(ref) -> jax.Array:
  """Loads what other programs stored, not from this processor's own cache."""
  return plgpu.load(ref, cache_modifier='.cg')
