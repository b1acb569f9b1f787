"""Shapes of the move of rows in pages in real models."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes

_PAGE_SIZE = 16
_NUM_KEPT = (7, 15)  # of drafts, their roots left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_caches: keys and values of all layers.
    width: C.
    num_kept: T.
    batch_size: B.
    page_size: Z.
    dtype: dtype of the caches.
  """

  DONATED = (0,)
  ROUNDED = ('batch_size', 'num_kept')
  num_caches: int
  width: int
  num_kept: int
  batch_size: int = call_spec.MOST_ROWS
  page_size: int = _PAGE_SIZE
  dtype: str = 'bfloat16'

  @property
  def num_bytes(self) -> int:
    """Bytes that are read and written; numbers have two bytes."""
    tokens = self.num_caches * self.batch_size * self.num_kept
    return 4 * tokens * self.width

  def arrays(self) -> tuple[Any, ...]:
    rows = (self.batch_size, self.num_kept)
    # Every second place is moved, and the last pages stay.
    num_pages = 1 + 2 * self.batch_size * self.num_kept // self.page_size
    pages = (num_pages, self.page_size, self.width)
    return (
      [jax.ShapeDtypeStruct(pages, self.dtype)] * self.num_caches,
      jax.ShapeDtypeStruct(rows, jnp.int32),
      jax.ShapeDtypeStruct(rows, jnp.int32),
    )

  def with_meaning(self, caches, sources, targets):
    """Every second token of a row is kept, the last one nowhere."""
    first = 2 * self.num_kept * jnp.arange(self.batch_size)[:, None]
    index = jnp.arange(self.num_kept)[None]
    num_places = caches[0].shape[0] * self.page_size
    kept = jnp.where(index < self.num_kept - 1, first + index, num_places)
    return (
      caches,
      (first + 2 * index).astype(sources.dtype),
      kept.astype(targets.dtype),
    )


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards, num_kept in itertools.product(
    model_shapes.MODELS, model_shapes.TENSOR_PARALLEL, _NUM_KEPT
  ):
    spec = ArgSpec(
      name=f'B{call_spec.MOST_ROWS} rows {num_kept}',
      num_caches=2 * model.num_layers,
      width=model.kv_heads_of(shards) * model.head_dim,
      num_kept=num_kept,
    )
    yield f'{model.name}/tp{shards}', spec
