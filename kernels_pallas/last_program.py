"""Work that the last of several programs does, for Pallas Triton kernels.

The programs count themselves. Their counters are zero when a kernel begins and
when it has ended, so all kernels of a compiled program have the same array: XLA
fills it once, where an array for each kernel would be a launch more. XLA starts
the kernels one after the other; `dispatch.check_flags` refuses other settings.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas import dispatch

_NUM_COUNTERS = 1024  # of most kernels, so that their arrays are the same one


def counters(
  num_counters: int, index_fn: Callable[..., jax.Array]
) -> tuple[jax.Array, pl.BlockSpec]:
  """Returns the input of a kernel that `is_last` counts in, and its part.

  Args:
    num_counters: number of counters that are used.
    index_fn: function of the indices of a program, its counter i32[].

  Raises:
    ValueError: as `dispatch.check_flags` does.
  """
  dispatch.check_flags()
  size = max(num_counters, _NUM_COUNTERS)
  spec = pl.BlockSpec((None, 1), lambda *ids: (index_fn(*ids), 0))
  return jnp.zeros((size, 1), jnp.int32), spec


def is_last(num_done, num_programs: int, *, interpret: bool) -> jax.Array:
  """Counts this program; returns bool[], whether all others have counted.

  If so, what the others stored before they counted is visible. The count
  releases and acquires at the scope of the device, and barriers before and
  after it order the other threads of a program.

  Args:
    num_done: i32[1] counter that the programs share, one of `counters`.
    num_programs: number of programs that share the counter.
    interpret: whether the interpreter runs the programs. It runs one after
      the other and has no barrier.
  """
  if not interpret:
    # All threads have stored before one of them counts.
    plgpu.debug_barrier()
  zero = jnp.zeros((), jnp.int32)
  is_last = plgpu.atomic_add(num_done, zero, zero + 1) == num_programs - 1

  @pl.when(is_last)
  def _():
    num_done[0] = zero

  return is_last
