"""Shapes of gated layers in real models, for compilers and measurements."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_tokens: N.
    embed_dim: D.
    ffw_dim: F.
    activation: name of the activation of the gate.
    dtype: dtype of x and weights.
  """

  num_tokens: int
  embed_dim: int
  ffw_dim: int
  activation: str
  dtype: str

  @property
  def num_bytes(self) -> int:
    result = self.num_tokens * self.ffw_dim
    return super().num_bytes + result * jnp.dtype(self.dtype).itemsize

  @property
  def num_flops(self) -> int:
    return 4 * self.num_tokens * self.embed_dim * self.ffw_dim

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
      jax.ShapeDtypeStruct((self.num_tokens, self.embed_dim), self.dtype),
      jax.ShapeDtypeStruct((self.embed_dim, 2, self.ffw_dim), self.dtype),
    )

  def options(self) -> dict[str, Any]:
    return {'activation': self.activation}


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards, num_tokens, dtype in itertools.product(
    model_shapes.MODELS,
    model_shapes.TENSOR_PARALLEL,
    model_shapes.NUM_TOKENS,
    ('bfloat16', 'float32'),
  ):
    if dtype == 'float32' and model.name not in model_shapes.BUILTIN:
      continue
    spec = ArgSpec(
      name=f'T{num_tokens} {dtype}',
      num_tokens=num_tokens,
      embed_dim=model.embed_dim,
      ffw_dim=model.ffw_of(shards),
      activation=model.activation,
      dtype=dtype,
    )
    yield f'{model.name}/tp{shards}', spec
