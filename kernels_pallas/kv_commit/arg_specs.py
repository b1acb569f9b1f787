"""Shapes of the move of cache rows in real models."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes

CAPACITY = 1_152
# Of a comparison: more than a launch takes on a GPU.
MOST_CACHES = 40
_START = 500  # of the rows that are kept
# Rows after the prefix: of a target's trees, and of a draft's.
_NUM_ROWS = (8, 16, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_caches: keys and values of all layers.
    num_kv_heads: G.
    head_dim: E.
    num_rows: rows after the prefix that may be kept.
    num_kept: T, most rows that are kept.
    batch_size: B.
    capacity: S.
    dtype: dtype of the caches.
  """

  DONATED = (0,)
  ROUNDED = ('batch_size', 'num_rows', 'num_kept', 'capacity')
  num_caches: int
  num_kv_heads: int
  head_dim: int
  num_rows: int
  num_kept: int
  batch_size: int = 1
  capacity: int = CAPACITY
  dtype: str = 'bfloat16'

  @property
  def num_bytes(self) -> int:
    """Bytes that are read and written: row 0 stays, numbers have two bytes."""
    heads = self.num_caches * self.batch_size * self.num_kv_heads
    return 4 * heads * (self.num_rows - 1) * self.head_dim

  def arrays(self) -> tuple[Any, ...]:
    batch = self.batch_size
    cache = (batch, self.num_kv_heads, self.capacity, self.head_dim)
    return (
      [jax.ShapeDtypeStruct(cache, self.dtype)] * self.num_caches,
      jax.ShapeDtypeStruct((batch,), jnp.int32),
      jax.ShapeDtypeStruct((batch, self.num_kept), jnp.int32),
    )

  def options(self) -> dict[str, Any]:
    return {'num_rows': self.num_rows}

  def with_meaning(self, caches, starts, path):
    """Every second row is kept."""
    step = jnp.arange(self.num_kept, dtype=jnp.int32)[None] * 2 % self.num_rows
    start = min(_START, self.capacity - self.num_rows)
    return (
      caches,
      jnp.full_like(starts, start),
      jnp.broadcast_to(step, path.shape),
    )


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
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
      num_kept=num_rows,
      batch_size=batch,
    )
    yield f'{model.name}/tp{shards}', spec
