"""Devices to compile for that need not be there."""

import dataclasses
import functools
import pathlib

import jax
from jax.experimental import topologies

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Eight devices of one kind.

  Attributes:
    name: name for the table.
    platform: platform of `jax.experimental.topologies`.
    topology: name of the topology there.
    bytes_per_device: memory of one.
    sizes: numbers of them that may work together. A v5e or v6e slice of
      2x4 has no collectives among six: its compiler refuses them.
  """

  name: str
  platform: str
  topology: str
  bytes_per_device: int
  sizes: tuple[int, ...] = (1, 2, 4, 6, 8)

  @functools.cached_property
  def devices(self) -> list[jax.Device]:
    """The devices; the compiler's plug-in is loaded at the first use."""
    options = {}
    if self.platform == 'cuda':
      _name_gpu()
      config = pathlib.Path(__file__).with_name('h200.textproto')
      options = {'target_config': config.read_text(), 'topology': '1x1x8'}
    return topologies.get_topology_desc(
      platform=self.platform, topology_name=self.topology, **options
    ).devices


def _name_gpu() -> None:
  """Tells Pallas which GPU Triton kernels are for.

  From 0.11.1 on JAX asks the default device, which is a CPU here.
  """
  if jax.__version_info__ >= (0, 11, 1):
    from jax._src.pallas.triton import gpu_info

    gpu_info.registry['cpu'] = functools.partial(
      gpu_info.get_gpu_info_from_version, gpu_info.GpuVersion.H200
    )


TARGETS = {
  target.name: target
  for target in (
    Target(
      name='v5e',
      platform='tpu',
      topology='v5e:2x4',
      bytes_per_device=16 * _GIB,
      sizes=(1, 2, 4, 8),
    ),
    Target(
      name='v5p',
      platform='tpu',
      topology='v5p:2x2x2',
      bytes_per_device=95 * _GIB,
    ),
    Target(
      name='v6e',
      platform='tpu',
      topology='v6e:2x4',
      bytes_per_device=32 * _GIB,
      sizes=(1, 2, 4, 8),
    ),
    Target(
      name='h200',
      platform='cuda',
      topology='h200',
      bytes_per_device=141 * 10**9,
    ),
  )
}
