"""What kernels share that need all logits of a token on one device."""

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from kernels_pallas import dispatch, tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuConfig:
  """Tiles of a TPU kernel.

  Attributes:
    block_vocab: tokens of a tile, a multiple of 128.
  """

  block_vocab: int = 8192

  def __post_init__(self):
    tiles.check_multiples(self, tiles.LANES, 'block_vocab')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuConfig:
  """Tiles of a GPU kernel.

  Attributes:
    block_vocab: tokens of a tile, a power of two.
    num_programs: most programs of a row, a power of two.
    num_warps: of a program.
  """

  block_vocab: int = 1024
  num_programs: int = 128
  num_warps: int = 4

  def __post_init__(self):
    tiles.check_powers(self, 'block_vocab', 'num_programs', 'num_warps')


def choose(
  kernel: str,
  described: str,
  implementation: str,
  sharding: Sharding | None,
  logits: jax.Array,
  backends: Mapping[str, ModuleType],
) -> str:
  """Returns the name of the implementation.

  Args:
    kernel: its name, for the record.
    described: the arguments, for the record; the devices are added.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: of an array on the same devices; None is JAX's default device.
    logits: [B, T, V].
    backends: by name; their `check` takes shape and dtype.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  num_devices = 1 if sharding is None else len(sharding.device_set)

  def check(backend):
    if num_devices > 1:
      raise NotImplementedError(
        f'the vocabulary is shared by {num_devices} devices'
      )
    backend.check(logits.shape, logits.dtype)

  return dispatch.choose(
    kernel,
    f'{described} on {num_devices} devices',
    implementation,
    dispatch.platform_of(sharding),
    {
      name: functools.partial(check, backend)
      for name, backend in backends.items()
    },
  )


def check(
  shape: tuple[int, ...],
  dtype: jax.typing.DTypeLike,
  *,
  most_tokens: int,
) -> None:
  """Raises NotImplementedError with the reason if a kernel cannot do it.

  Args:
    shape: [B, T, V] of logits.
    dtype: of the logits.
    most_tokens: T that the kernel takes.
  """
  if dtype != jnp.float32:
    raise NotImplementedError(f'dtype {dtype} is not float32')
  if shape[1] > most_tokens:
    raise NotImplementedError(f'{shape[1]} tokens are more than {most_tokens}')
