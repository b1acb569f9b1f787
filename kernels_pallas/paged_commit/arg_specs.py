"""Shapes of the move of rows in pages in real models."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes
from kernels_pallas.kv_commit import arg_specs as dense_specs

_PAGE_SIZE = 16
_NUM_KEPT = (7, 15)  # of drafts, their roots left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    name: models that have the shape, and the sizes.
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

  @classmethod
  def of_call(
    cls,
    name: str,
    num_caches: int,
    pages_shape: tuple[int, ...],
    places_shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
  ) -> 'ArgSpec':
    """Returns the spec of a call.

    Args:
      name: shape in words.
      num_caches: number of caches.
      pages_shape: (P, Z, C) of a device.
      places_shape: (B, T).
      dtype: dtype of the caches.
    """
    return cls(
      name=name,
      num_caches=min(num_caches, dense_specs.MOST_CACHES),
      width=pages_shape[2],
      num_kept=places_shape[1],
      batch_size=min(places_shape[0], call_spec.MOST_ROWS),
      page_size=pages_shape[1],
      dtype=jnp.dtype(dtype).name,
    )

  @property
  def num_bytes(self) -> int:
    """Bytes that are read and written; numbers have two bytes."""
    tokens = self.num_caches * self.batch_size * self.num_kept
    return 4 * tokens * self.width

  def arrays(self) -> tuple[Any, ...]:
    """Returns the abstract arguments of `paged_commit`."""
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


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return model_shapes.once_each(_all())


def _all() -> Iterator[tuple[str, ArgSpec]]:
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
