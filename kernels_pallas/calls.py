"""How the functions that models call choose an implementation and run it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from kernels_pallas import dispatch, registry, trials, tuning
from kernels_pallas.call_spec import Arrays, CallSpec


def choose(
  kernel: str,
  spec: CallSpec,
  implementation: str,
  sharding: Sharding | None,
  *arguments: Any,
  **refused: str | None,
) -> str:
  """Returns the implementation for `spec`, as `dispatch.choose` does.

  Args:
    kernel: name of the kernel.
    spec: shapes, dtypes and options of the call on one device.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of any array of the call; None is JAX's default device.
    *arguments: what each `check` of the kernel takes.
    **refused: why an implementation cannot do it; None leaves it to `check`.
  """

  def refuse(reason):
    raise NotImplementedError(reason)

  checks = registry.checks(kernel, *arguments)
  for name, reason in refused.items():
    if reason is not None:
      checks[name] = functools.partial(refuse, reason)
  return dispatch.choose(
    kernel,
    spec.name,
    implementation,
    dispatch.platform_of(sharding),
    checks,
    trial=functools.partial(trials.verdict, kernel, spec, sharding),
  )


def function(
  kernel: str,
  chosen: str,
  options: dict[str, Any],
  sharding: Sharding | None,
) -> Callable[..., Any]:
  """Returns an implementation with the tiles that were measured for it."""
  call = functools.partial(registry.function(kernel, chosen), **options)
  return tuning.tuned(kernel, chosen, call, sharding)


def run(
  kernel: str,
  chosen: str,
  arrays: Arrays,
  options: dict[str, Any],
  sharding: NamedSharding | None = None,
  in_specs: tuple[PartitionSpec, ...] = (),
  out_specs: Any = None,
) -> Any:
  """Returns what an implementation makes of arrays, each device of its part.

  Arrays at the end may be missing, and `in_specs` have more. The reference is
  parted by the compiler.
  """
  call = function(kernel, chosen, options, sharding)
  if sharding is not None and chosen != dispatch.REFERENCE:
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=in_specs[: len(arrays)],
      out_specs=out_specs,
      check_vma=False,
    )
  return call(*arrays)


def for_triton_alone(implementation: str) -> str:
  """Returns the reference for names of which there is no such kernel."""
  is_other = implementation in ('pallas_tpu', 'mosaic_gpu')
  return dispatch.REFERENCE if is_other else implementation


def several_devices(sharding: NamedSharding | None) -> str | None:
  """Returns why a kernel of one device is refused, None if it is not."""
  is_one = sharding is None or sharding.mesh.size == 1
  return None if is_one else 'several devices share the cache'


def local_part(
  array: jax.Array, sharding: NamedSharding | None
) -> jax.ShapeDtypeStruct:
  """Returns the abstract part of an array that a device has."""
  shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
  return jax.ShapeDtypeStruct(shape, array.dtype)


def axes_of(sharding: NamedSharding | None, num_axes: int) -> tuple[Any, ...]:
  """Returns the axes of the mesh along which those of an array are sharded."""
  spec = () if sharding is None else sharding.spec
  return (*spec, *[None] * num_axes)[:num_axes]
