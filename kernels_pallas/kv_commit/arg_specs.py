"""Shapes of the move of cache rows in real models."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import model_shapes

_CAPACITY = 1_152
# Rows behind the prefix: of a target's trees, and of a draft's.
_NUM_ROWS = (8, 16, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """The arguments of one call, on one device.

  Attributes:
    name: models that have the shape, and the sizes.
    num_caches: keys and values of all layers.
    num_kv_heads: G.
    head_dim: E.
    num_rows: behind the prefix, all to keep.
    batch_size: B.
  """

  name: str
  num_caches: int
  num_kv_heads: int
  head_dim: int
  num_rows: int
  batch_size: int = 1

  def arrays(self) -> tuple[Any, ...]:
    """Returns the abstract arguments of `kv_commit`."""
    batch = self.batch_size
    cache = (batch, self.num_kv_heads, _CAPACITY, self.head_dim)
    return (
      [jax.ShapeDtypeStruct(cache, jnp.bfloat16)] * self.num_caches,
      jax.ShapeDtypeStruct((batch,), jnp.int32),
      jax.ShapeDtypeStruct((batch, self.num_rows), jnp.int32),
    )

  def options(self) -> dict[str, Any]:
    """Returns the keyword arguments."""
    return {'num_rows': self.num_rows}


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return model_shapes.once_each(_all())


def _all() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards, (num_rows, batch) in itertools.product(
    model_shapes.MODELS,
    model_shapes.TENSOR_PARALLEL,
    (*((rows, 1) for rows in _NUM_ROWS), (8, 4)),
  ):
    spec = ArgSpec(
      name=f'B{batch} rows {num_rows}',
      num_caches=2 * model.num_layers,
      num_kv_heads=model.kv_heads_of(shards),
      head_dim=model.head_dim,
      num_rows=num_rows,
      batch_size=batch,
    )
    yield f'{model.name}/tp{shards}', spec
