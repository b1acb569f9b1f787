"""Compilation without a run, for programs that are not needed yet."""

from collections.abc import Callable
from typing import Any

import jax

from swiftspec_jax.runtime import sharding as sharding_lib


def compile_only(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Compiles a jitted function for arguments, which may be abstract.

  A later call with such arguments finds the program, as JAX keeps the lowered
  computation of a function with its executable.

  Returns:
    What a call would return, abstract.
  """
  lowered = fn.lower(*args, **kwargs)
  compiled = lowered.compile()
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    lowered.out_info,
    compiled.output_shardings,
  )


def abstract(tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
  """Returns arrays without their contents, with a sharding or their own."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding or x.sharding
    ),
    tree,
  )


def replicate(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
  """Does what `sharding.replicate` does, if there is something to do."""
  sharding = sharding_lib.replicated(mesh)
  if isinstance(array, jax.ShapeDtypeStruct):
    return abstract(array, sharding)
  if array.sharding == sharding:
    return array
  return sharding_lib.replicate(array, mesh)
