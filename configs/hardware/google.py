"""TPUs of Google.

Peaks, memories and links are those of the pages of each TPU in the Google Cloud
documentation; links have half of the documented rate in each direction. Nobody
published step times of small batches to fit the latencies to, so these are
assumptions, and plans for TPUs are rougher than plans for GPUs.
"""

from swiftspec_jax.simulator.planning.forward import Chip

_SHARED = {
  # A hop between neighbours takes about 1 us ("How to scale your model", the
  # chapter on sharding); assumed for each chip of an all-reduce.
  'link_latency': 1e-6,
  # A step is one program: no driver starts its parts. Assumed, not measured.
  'launch_seconds': 1e-6,
  'sources': {'link_latency': 'assumed', 'launch_seconds': 'assumed'},
}
_GIB = 2**30

V5E = Chip(  # docs.cloud.google.com/tpu/docs/v5e
  name='v5e',
  device_kinds=('TPU v5 lite', 'TPU v5e'),
  memory_bytes=16 * _GIB,
  peak_flops={'bfloat16': 197e12, 'int8': 393e12},
  memory_bandwidth=819e9,
  link_bandwidth=200e9,
  **_SHARED,
)
V5P = Chip(  # docs.cloud.google.com/tpu/docs/v5p; int8 from the same book
  name='v5p',
  device_kinds=('TPU v5', 'TPU v5p'),
  memory_bytes=95 * _GIB,
  peak_flops={'bfloat16': 459e12, 'int8': 918e12},
  memory_bandwidth=2765e9,
  link_bandwidth=600e9,
  **_SHARED,
)
V6E = Chip(  # docs.cloud.google.com/tpu/docs/v6e
  name='v6e',
  device_kinds=('TPU v6 lite', 'TPU v6e'),
  memory_bytes=32 * _GIB,
  peak_flops={'bfloat16': 918e12, 'int8': 1836e12},
  memory_bandwidth=1638e9,
  link_bandwidth=400e9,
  **_SHARED,
)
TPU7X = Chip(  # docs.cloud.google.com/tpu/docs/tpu7x, which has fp8, no int8
  name='tpu7x',
  device_kinds=('TPU7x',),
  memory_bytes=192 * _GIB,
  peak_flops={'bfloat16': 2307e12, 'float8': 4614e12},
  memory_bandwidth=7380e9,
  link_bandwidth=600e9,
  **_SHARED,
)
CHIPS = V5E, V5P, V6E, TPU7X
