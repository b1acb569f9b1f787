"""GPUs of NVIDIA, each eight to a host behind NVLink switches.

Peaks are of dense products: half of what data sheets give with sparsity. Links
have half of the data sheet's rate in each direction.
"""

import dataclasses

from swiftspec_jax.simulator.planning.forward import Chip

_SHARED = {
  # SwiftSpec, table 3: all-reduces of 128 KiB among four H800 take 12.0 and
  # 15.3 us, of which the bytes take 1 us. Taken to be the same on other GPUs.
  'link_latency': (13.65e-6 - 1e-6) / 4,
  # Fitted to SwiftSpec, table 1 (H800, CUDA graphs), and to SmartSpec's
  # coefficients (H100): `experiments.plan` prints the fit. Same remark.
  'launch_seconds': 5.81e-6,
  'sources': {
    'link_latency': 'SwiftSpec, table 3',
    'launch_seconds': 'fitted to published step times',
  },
}

H100 = Chip(  # data sheet, SXM
  name='h100',
  device_kinds=('NVIDIA H100 80GB HBM3',),
  memory_bytes=80e9,
  peak_flops={'bfloat16': 989e12, 'int8': 1979e12},
  memory_bandwidth=3.35e12,
  link_bandwidth=450e9,
  **_SHARED,
)
# NVLink has 400 GB/s both ways together.
H800 = dataclasses.replace(
  H100, name='h800', device_kinds=('NVIDIA H800',), link_bandwidth=200e9
)
H200 = dataclasses.replace(  # data sheet, SXM: the memory is another
  H100,
  name='h200',
  device_kinds=('NVIDIA H200',),
  memory_bytes=141e9,
  memory_bandwidth=4.8e12,
)
B200 = Chip(  # DGX B200 data sheet, divided by eight
  name='b200',
  device_kinds=('NVIDIA B200',),
  memory_bytes=180e9,
  peak_flops={'bfloat16': 2.25e15, 'int8': 4.5e15},
  memory_bandwidth=8e12,
  link_bandwidth=900e9,
  **_SHARED,
)
CHIPS = H800, H100, H200, B200
