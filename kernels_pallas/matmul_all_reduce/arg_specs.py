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
    return (
      jax.ShapeDtypeStruct((1, self.num_tokens, self.num_inputs), 'bfloat16'),
      jax.ShapeDtypeStruct((self.num_inputs, self.num_outputs), 'bfloat16'),
    )


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
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
