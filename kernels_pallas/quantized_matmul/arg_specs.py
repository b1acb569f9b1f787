"""Shapes of quantized products in real models, for compilers."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes
from kernels_pallas.quantized_matmul import tiles

_GROUP_SIZE = 128
_NUM_TOKENS = 8
# Kernels pad rows to 16 at least, so few models do for the other numbers.
_MODELS_WITH_ALL_TOKENS = ('llama-8b', 'smollm2-135m')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_tokens: T.
    num_parts: P.
    num_inputs: K.
    num_outputs: N.
    group_size: inputs that share a scale.
    dtype: dtype of the rows.
    weight_dtype: dtype of the weight, one of `tiles.BITS`.
    activation: gate that joins the parts, or None.
  """

  num_tokens: int
  num_parts: int
  num_inputs: int
  num_outputs: int
  group_size: int
  dtype: str
  weight_dtype: str
  activation: str | None = None

  @classmethod
  def of_call(cls, x: Any, values: Any, scales: Any, **options: Any) -> Self:
    """Returns the spec of a device's part, whose dtypes and shapes are read."""
    num_parts, num_inputs, num_outputs = values.shape
    activation = options.get('activation')
    return cls(
      name=f'x {x.dtype}{list(x.shape)}, weight {values.dtype}'
      f'{list(values.shape)}, {scales.shape[1]} groups'
      f'{f", {activation}" if activation else ""}',
      num_tokens=x.shape[0],
      num_parts=num_parts,
      num_inputs=num_inputs,
      num_outputs=num_outputs,
      group_size=num_inputs // scales.shape[1],
      dtype=x.dtype.name,
      weight_dtype=values.dtype.name,
      **options,
    )

  @property
  def num_bytes(self) -> int:
    x, *_, values, scales = self.arrays()
    num_results = 1 if self.activation else self.num_parts
    result = self.num_tokens * num_results * self.num_outputs
    return (
      values.size * tiles.BITS[self.weight_dtype] // 8
      + scales.size * scales.dtype.itemsize
      + (x.size + result) * x.dtype.itemsize
    )

  @property
  def num_flops(self) -> int:
    weights = self.num_parts * self.num_inputs * self.num_outputs
    return 2 * weights * self.num_tokens

  def options(self) -> dict[str, str | None]:
    return {'activation': self.activation}

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    num_groups = self.num_inputs // self.group_size
    parts, outputs = self.num_parts, self.num_outputs
    return (
      jax.ShapeDtypeStruct((self.num_tokens, self.num_inputs), self.dtype),
      jax.ShapeDtypeStruct(
        (parts, self.num_inputs, outputs), self.weight_dtype
      ),
      jax.ShapeDtypeStruct((parts, num_groups, outputs), jnp.float32),
    )

  def suits(self, implementation):
    """Whether it can: that with wgmma has bfloat16 and integers alone."""
    is_fit = self.dtype == 'bfloat16' and self.weight_dtype in ('int8', 'int4')
    return implementation != 'mosaic_gpu' or is_fit


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields users and their shapes."""
  for model, shards, weight_dtype in itertools.product(
    model_shapes.MODELS, model_shapes.TENSOR_PARALLEL, tiles.BITS
  ):
    for name, sizes in _matrices(model, shards).items():
      user = f'{model.name}/tp{shards}/{name}'
      options = (sizes, weight_dtype)
      numbers = (_NUM_TOKENS,)
      if model.name in _MODELS_WITH_ALL_TOKENS:
        numbers = (*model_shapes.NUM_TOKENS, tiles.MOST_ROWS)
      for num_tokens in numbers:
        yield user, _spec(*options, num_tokens, 'bfloat16')
      if model.name in model_shapes.BUILTIN:
        yield user, _spec(*options, _NUM_TOKENS, 'float32')


def _matrices(
  model: model_shapes.ModelShape, num_shards: int
) -> dict[str, tuple[int, int, int, int]]:
  """Returns P, K, N and the group size of a layer's matrices."""
  embed, head_dim = model.embed_dim, model.head_dim
  heads = model.kv_heads_of(num_shards)
  head_inputs = model.num_groups * head_dim
  # Whole groups on each device.
  group = math.gcd(model.ffw_dim, _GROUP_SIZE)
  ffw = math.ceil(model.ffw_dim / (num_shards * group)) * group
  embed_group = math.gcd(embed, _GROUP_SIZE)
  head_group = math.gcd(head_inputs, _GROUP_SIZE)
  return {
    'qkv': (1, embed, heads * (model.num_groups + 2) * head_dim, embed_group),
    'attention_out': (1, heads * head_inputs, embed, head_group),
    'gate_up': (2, embed, ffw, embed_group),
    'down': (1, ffw, embed, group),
  }


def _spec(sizes, weight_dtype, num_tokens, dtype) -> ArgSpec:
  num_parts, num_inputs, num_outputs, group_size = sizes
  if weight_dtype == 'int8':  # a scale for each output
    group_size = num_inputs
  return ArgSpec(
    name=(
      f'T{num_tokens} {dtype} x {weight_dtype}'
      f'[{num_parts}, {num_inputs}, {num_outputs}]'
    ),
    activation='silu' if num_parts == 2 else None,
    num_tokens=num_tokens,
    num_parts=num_parts,
    num_inputs=num_inputs,
    num_outputs=num_outputs,
    group_size=group_size,
    dtype=dtype,
    weight_dtype=weight_dtype,
  )
