"""What to know in the first minutes: is each kernel right, and without races?

Kernels are deterministic: results of equal arguments that differ are a race.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accelerator import rows as rows_lib
from experiments.accelerator import shapes
from experiments.accelerator.jobs import correctness_jobs
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels.kernel_cases import Case, Contender

_NUM_TURNS = 3  # shapes of each kernel
_NUM_RUNS = 100
_PRODUCT_ROWS = (1, 8)  # of a plain step and of a verification


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; on a CPU Triton kernels run in the interpreter."""
  size = 64 if settings.tiny else 4096
  num_runs = 3 if settings.tiny else _NUM_RUNS
  cases = shapes.chosen_cases(tiny=settings.tiny)
  return [
    *(
      Job(
        name=f'float32 product {precision}',
        shape=f'{rows} x {size} x {size}',
        run=functools.partial(_product, rows, size, precision),
      )
      for rows in _PRODUCT_ROWS
      for precision in ('default', 'highest')
    ),
    *(
      Job(
        name=f'{case.kernel} {kernel.name}',
        shape=case.spec.name,
        run=functools.partial(_check, case, kernel, num_runs),
        limit=100.0,
      )
      for case in cases[: _NUM_TURNS * len(shapes.KERNELS)]
      for kernel in correctness_jobs.kernels(case)
    ),
  ]


def _product(rows: int, size: int, precision: str) -> list[Row]:
  """How far a product is from the exact one."""
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (rows, size))
  weight = jax.random.normal(keys[1], (size, size))
  with jax.default_matmul_precision(precision):
    got = np.asarray(jax.jit(jnp.dot)(x, weight), np.float64)
  want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
  return [Row(max_error=np.abs(got - want).max() / np.abs(want).max())]


def _check(case: Case, kernel: Contender, num_runs: int) -> list[Row]:
  found = correctness_jobs.compare(case, kernel)
  arrays = case.spec.make_arrays(jax.random.key(2))
  num_odd = int(_num_odd(kernel.call, arrays, num_runs))
  seconds = case.seconds_of(kernel, shapes.REPEATS)
  is_good = found.is_same and not num_odd
  return [
    Row(
      seconds=seconds,
      bandwidth_share=case.spec.num_bytes / seconds / shapes.bandwidth(),
      max_error=found.max_error,
      status=rows_lib.OK if is_good else rows_lib.DIFFERS,
      figures={'tolerance': found.tolerance, 'odd_runs': num_odd},
    )
  ]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _num_odd(call: Callable[..., Any], arrays: Any, num_runs: int) -> jax.Array:
  """Returns how many of the runs give other bits than the first."""
  first = jax.tree.leaves(call(*arrays))

  def count(_, num_odd):
    # Without the barrier XLA could run the call once for all.
    again, _ = jax.lax.optimization_barrier((arrays, num_odd))
    results = jax.tree.leaves(call(*again))
    differs = [
      jnp.any(_bits(x) != _bits(y)) for x, y in zip(first, results, strict=True)
    ]
    return num_odd + jnp.any(jnp.stack(differs)).astype(jnp.int32)

  return jax.lax.fori_loop(0, num_runs, count, jnp.int32(0))


def _bits(x: jax.Array) -> jax.Array:
  """Returns integers, as no number equals itself if it is not a number."""
  return jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
