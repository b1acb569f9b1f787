"""What the device is, and what it reaches."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.accelerator import shapes
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from experiments.kernels import kernel_timing
from kernels_pallas import comparison
from swiftspec_jax.cli import provenance

_PRODUCTS: dict[str, dict[str, Any]] = {
  'bfloat16': {'dtype': jnp.bfloat16},
  'float32': {'dtype': jnp.float32},
  'float32 highest': {
    'dtype': jnp.float32,
    'precision': jax.lax.Precision.HIGHEST,
  },
  'int8': {'dtype': jnp.int8},
}
_NUM_DISPATCHES = 200


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs."""
  num_bytes = 2**22 if settings.tiny else 2**30
  size = 128 if settings.tiny else 8192
  return [
    Job(name='versions', run=_versions),
    *(
      Job(
        name=name,
        shape=f'{num_bytes / 1e6:.0f} MB',
        run=functools.partial(_bytes, measure, num_bytes, num_moved),
      )
      for name, measure, num_moved in (
        ('read', kernel_timing.read_bandwidth, num_bytes),
        ('copy', kernel_timing.copy_bandwidth, 2 * num_bytes),
      )
    ),
    *(
      Job(
        name=f'product {name}',
        shape=f'{size} x {size} x {size}',
        run=functools.partial(_product, size, options),
      )
      for name, options in _PRODUCTS.items()
    ),
    Job(name='dispatch', shape='a program of one addition', run=_dispatch),
  ]


def _versions() -> list[Row]:
  device = jax.devices()[0]
  names = 'git_sha', 'platform', 'cpu', 'cpu_count', 'date'
  facts = provenance.collect()
  facts = {
    **{name: facts[name] for name in names},
    **facts['versions'],
    'device_count': facts['device_count'],
    'memory_bytes': (device.memory_stats() or {}).get('bytes_limit'),
    'compute_capability': getattr(device, 'compute_capability', None),
    'driver': comparison.driver_of(device),
    'clock': 'profiler' if kernel_timing.has_clock() else 'host',
  }
  known = {name: value for name, value in facts.items() if value is not None}
  return [Row(figures=known)]


def _bytes(measure, num_bytes, num_moved) -> list[Row]:
  rate = measure(num_bytes, shapes.REPEATS)
  return [
    Row(
      seconds=num_moved / rate,
      bandwidth_share=rate / shapes.bandwidth(),
      figures={'bytes_per_second': rate},
    )
  ]


def _product(size, options) -> list[Row]:
  rate = kernel_timing.matrix_rate(size, shapes.REPEATS, **options)
  figures = {'operations_per_second': rate}
  return [Row(seconds=2 * size**3 / rate, figures=figures)]


def _dispatch() -> list[Row]:
  """What the host needs for a program, with and without waiting for it."""
  program = jax.jit(lambda x: x + 1)
  x = program(jnp.zeros(()))
  waits = []
  for _ in range(_NUM_DISPATCHES):
    start = time.perf_counter()
    x = program(x).block_until_ready()
    waits.append(time.perf_counter() - start)
  start = time.perf_counter()
  for _ in range(_NUM_DISPATCHES):
    x = program(x)
  x.block_until_ready()
  seconds = (time.perf_counter() - start) / _NUM_DISPATCHES
  figures = {'seconds_with_wait': statistics.median(waits)}
  return [Row(seconds=seconds, figures=figures)]
