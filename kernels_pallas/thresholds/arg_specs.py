"""Shapes of the thresholds of real models, for compilers and measurements."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import model_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """The arguments of one call: with top-k and top-p.

  Attributes:
    name: models that have the shape, and the sizes.
    num_queries: T.
    vocab_size: V.
    batch_size: B.
  """

  name: str
  num_queries: int
  vocab_size: int
  batch_size: int

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `find_thresholds`."""
    shape = (self.batch_size, self.num_queries, self.vocab_size)
    return (
      jax.ShapeDtypeStruct(shape, jnp.float32),
      jax.ShapeDtypeStruct(shape[:1], jnp.int32),
      jax.ShapeDtypeStruct(shape[:1], jnp.float32),
    )

  def options(self) -> dict[str, Any]:
    """Returns the keyword arguments: none."""
    return {}


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return model_shapes.once_each(_all())


def _all() -> Iterator[tuple[str, ArgSpec]]:
  """Yields users and their shapes, the same ones several times."""
  for model in model_shapes.MODELS:
    for batch_size in (1, 4):
      for num_queries in model_shapes.NUM_TOKENS:
        yield (
          model.name,
          ArgSpec(
            name=f'B{batch_size} T{num_queries} V{model.vocab_size}',
            num_queries=num_queries,
            vocab_size=model.vocab_size,
            batch_size=batch_size,
          ),
        )
