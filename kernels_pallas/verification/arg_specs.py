"""Shapes of the verification of real models, for compilers and measurements."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import model_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """The arguments of one call.

  Attributes:
    name: models that have the shape, and the sizes.
    num_nodes: T.
    vocab_size: V.
    batch_size: B.
  """

  name: str
  num_nodes: int
  vocab_size: int
  batch_size: int

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `verify_tree`."""
    nodes = (self.batch_size, self.num_nodes)
    return (
      jax.ShapeDtypeStruct((*nodes, self.vocab_size), jnp.float32),
      jax.ShapeDtypeStruct(nodes, jnp.int32),
      jax.ShapeDtypeStruct(nodes, jnp.int32),
      jax.ShapeDtypeStruct(nodes[:1], jnp.int32),
      jax.ShapeDtypeStruct((*nodes, self.num_nodes), jnp.bool_),
    )

  def options(self) -> dict[str, Any]:
    """Returns the keyword arguments: none."""
    return {}


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  names: dict[int, list[str]] = {}
  for model in model_shapes.MODELS:
    names.setdefault(model.vocab_size, []).append(model.name)
  return [
    ArgSpec(
      name=f'{"+".join(users)} B{batch_size} T{num_nodes} V{vocab_size}',
      num_nodes=num_nodes,
      vocab_size=vocab_size,
      batch_size=batch_size,
    )
    for vocab_size, users in names.items()
    for batch_size in (1, 4)
    for num_nodes in model_shapes.NUM_TOKENS
  ]
