"""Shapes of products that devices share by inputs, in real models."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from kernels_pallas import model_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """The arguments of one call, on all devices.

  Attributes:
    name: models that have the shape, and the sizes.
    num_devices: P.
    num_tokens: T.
    num_inputs: K.
    num_outputs: D.
  """

  name: str
  num_devices: int
  num_tokens: int
  num_inputs: int
  num_outputs: int

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the abstract arguments of `matmul_all_reduce`."""
    return (
      jax.ShapeDtypeStruct((1, self.num_tokens, self.num_inputs), 'bfloat16'),
      jax.ShapeDtypeStruct((self.num_inputs, self.num_outputs), 'bfloat16'),
    )


def arg_specs() -> list[ArgSpec]:
  """Returns all shapes, each once, with the models that have it."""
  return model_shapes.once_each(_all())


def _all() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards, num_tokens, part in itertools.product(
    model_shapes.MODELS,
    model_shapes.TENSOR_PARALLEL,
    model_shapes.NUM_TOKENS,
    ('attention', 'ffw'),
  ):
    if shards == 1:
      continue
    heads = model.kv_heads_of(shards) * model.num_groups
    share = heads * model.head_dim
    if part == 'ffw':
      share = model.ffw_of(shards)
    spec = ArgSpec(
      name=f'T{num_tokens} K{shards * share}',
      num_devices=shards,
      num_tokens=num_tokens,
      num_inputs=shards * share,
      num_outputs=model.embed_dim,
    )
    yield f'{model.name}/tp{shards}', spec
