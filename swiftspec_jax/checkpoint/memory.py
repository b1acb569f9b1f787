"""Whether the weights of a model fit into the memory of this machine."""

import dataclasses
import os
import pathlib
import re

import jax
from absl import logging
from jax.sharding import Mesh

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params

_MEMINFO = pathlib.Path('/proc/meminfo')  # of Linux


def warn_if_short(
  name: str, config: ModelConfig, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> None:
  """Warns, with a remedy, of a model that takes more memory than is free.

  This is for CPUs: other devices refuse what does not fit.

  Args:
    name: name of the model, for the message.
    config: configuration that it is loaded with.
    dtype: dtype of the weights that are not quantized.
    mesh: devices that it is loaded on.
  """
  needed, free = num_bytes(config, dtype, mesh), free_bytes()
  if mesh.devices.flat[0].platform != 'cpu' or needed <= free:
    return
  remedy = 'choose a smaller model'
  if config.weight_dtype is None:
    smaller = 'int8' if config.experts else 'int8_dynamic'
    quantized = dataclasses.replace(config, weight_dtype=smaller)
    size = num_bytes(quantized, dtype, mesh)
    remedy = f'weight_dtype={smaller} takes {_gigabytes(size)}'
  logging.warning(
    'The weights of %s take %s of memory, and %s are free; %s.',
    name,
    _gigabytes(needed),
    _gigabytes(free),
    remedy,
  )


def num_bytes(
  config: ModelConfig, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> int:
  """Returns the bytes of the weights on the devices of a mesh together."""
  arrays = jax.tree.leaves(params.abstract_params(config, dtype, mesh))
  return sum(x.size * x.dtype.itemsize for x in arrays)


def free_bytes() -> int:
  """Returns the bytes that programs can still take; on macOS, all there are."""
  if _MEMINFO.exists():
    found = re.search(r'^MemAvailable: +(\d+) kB$', _MEMINFO.read_text(), re.M)
    return int(found[1]) * 1024
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def _gigabytes(size: int) -> str:
  return f'{size / 1e9:.1f} GB'
