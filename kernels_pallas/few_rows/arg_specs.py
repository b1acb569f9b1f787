"""Shapes of products of few rows in models that CPUs run."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes

_NUM_TOKENS = (1, 2, 4, 8, 16)
# Of rows and weights.
_DTYPES = (
  ('float32', 'float32'),
  ('bfloat16', 'bfloat16'),
  ('float32', 'int8'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call.

  Attributes:
    num_tokens: N.
    num_inputs: K.
    out_shape: sizes of the axes A.
    dtype: dtype of the rows.
    weight_dtype: dtype of the weight.
    num_terms: integers for each number of rows, where the weight is int8.
    activation: gate that joins two parts of the outputs, or None.
    has_norm: whether it is the norm of a sum that is multiplied.
  """

  num_tokens: int
  num_inputs: int
  out_shape: tuple[int, ...]
  dtype: str
  weight_dtype: str
  num_terms: int = 1
  activation: str | None = None
  has_norm: bool = False

  def small(self):
    """All that it does; norms only where nothing is rounded after them."""
    is_exact = self.weight_dtype == 'float32'
    return dataclasses.replace(
      self,
      num_tokens=8,
      num_inputs=88,
      out_shape=(2, 24),
      activation='silu' if is_exact else None,
      has_norm=is_exact,
    )

  @property
  def num_bytes(self) -> int:
    results = self.num_tokens * math.prod(self.out_shape)
    return super().num_bytes + 4 * results

  @property
  def num_flops(self) -> int:
    return 2 * self.num_tokens * self.num_inputs * math.prod(self.out_shape)

  def arrays(self) -> call_spec.Arrays:
    rows = jax.ShapeDtypeStruct((self.num_tokens, self.num_inputs), self.dtype)
    scales, norm = None, (None, None)
    if self.weight_dtype == 'int8':
      scales = jax.ShapeDtypeStruct(self.out_shape, jnp.float32)
    if self.has_norm:
      norm = rows, jax.ShapeDtypeStruct((self.num_inputs,), jnp.float32)
    weight = (*self.out_shape, self.num_inputs)
    return rows, jax.ShapeDtypeStruct(weight, self.weight_dtype), scales, *norm

  def options(self) -> dict[str, Any]:
    options = {'num_terms': self.num_terms, 'activation': self.activation}
    return {**options, 'epsilon': 1e-5}


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model in model_shapes.MODELS:
    if model.name not in model_shapes.BUILTIN:
      continue
    matrices = _matrices(model)
    for (dtype, weight_dtype), num_tokens, name in itertools.product(
      _DTYPES, _NUM_TOKENS, matrices
    ):
      num_inputs, *out_shape = matrices[name]
      yield (
        f'{model.name}/{name}',
        ArgSpec(
          name=f'N{num_tokens} {weight_dtype}{[*out_shape, num_inputs]}',
          num_tokens=num_tokens,
          num_inputs=num_inputs,
          out_shape=tuple(out_shape),
          dtype=dtype,
          weight_dtype=weight_dtype,
        ),
      )


def _matrices(model: model_shapes.ModelShape) -> dict[str, tuple[int, ...]]:
  """Returns the inputs and outputs of the matrices of a model."""
  embed, heads = model.embed_dim, model.num_heads * model.head_dim
  in_group = model.num_groups + 2
  return {
    'qkv': (embed, model.num_kv_heads, in_group, model.head_dim),
    'attention_out': (heads, embed),
    'gate_up': (embed, 2, model.ffw_dim),
    'down': (model.ffw_dim, embed),
    'vocabulary': (embed, model.vocab_size),
  }
