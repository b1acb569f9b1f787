"""Shapes of products with experts in real models, for compilers.

Legend: R rows, X experts, K inputs, N outputs, C groups of inputs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from kernels_pallas import call_spec, model_shapes
from kernels_pallas.grouped_matmul import tiles
from kernels_pallas.quantized_matmul import tiles as dense

_NUM_TOKENS = (1, 64)
_ONE = 127  # the bits of a scale of MXFP4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  """The arguments of one call, on one device.

  Attributes:
    num_rows: R.
    num_experts: X.
    num_inputs: K.
    num_outputs: N.
    group_size: inputs that share a scale.
    dtype: dtype of the rows.
    weight_dtype: dtype of the weight, one of `dense.BITS`, or 'mxfp4'.
  """

  ROUNDED = ('num_rows',)
  num_rows: int
  num_experts: int
  num_inputs: int
  num_outputs: int
  group_size: int
  dtype: str
  weight_dtype: str

  @property
  def num_bytes(self) -> int:
    """Bytes of rows and result, and of as many experts as rows can choose."""
    x, values, scales, chosen = self.arrays()
    weight_bits = values.size * dense.BITS[values.dtype.name]
    weight_bytes = weight_bits // 8 + scales.size * scales.dtype.itemsize
    num_active = min(self.num_rows, self.num_experts)
    result = self.num_rows * self.num_outputs
    return (
      weight_bytes // self.num_experts * num_active
      + (x.size + result) * x.dtype.itemsize
      + chosen.size * chosen.dtype.itemsize
    )

  @property
  def num_flops(self) -> int:
    return 2 * self.num_rows * self.num_inputs * self.num_outputs

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = self.num_experts, self.num_inputs, self.num_outputs
    num_groups = self.num_inputs // self.group_size
    is_mxfp4 = self.weight_dtype == 'mxfp4'
    return (
      jax.ShapeDtypeStruct((self.num_rows, self.num_inputs), self.dtype),
      jax.ShapeDtypeStruct(sizes, 'int4' if is_mxfp4 else self.weight_dtype),
      jax.ShapeDtypeStruct(
        (self.num_experts, num_groups, self.num_outputs),
        jnp.uint8 if is_mxfp4 else jnp.float32,
      ),
      jax.ShapeDtypeStruct((self.num_rows,), jnp.int32),
    )

  def suits(self, implementation):
    """Whether it can; TPUs have some weights in another order."""
    sizes = self.num_experts, self.num_inputs, self.num_outputs
    return implementation != 'pallas_tpu' or not tiles.is_reordered(sizes)

  def with_meaning(self, x, values, scales, chosen):
    """Rows are sorted by experts, and bits of scales mean about 1."""
    if self.weight_dtype == 'mxfp4':
      scales = (_ONE + scales % 4).astype(jnp.uint8)
    return x, values, scales, jnp.sort(chosen % self.num_experts)


@dataclasses.dataclass(frozen=True)
class _Model:
  """The experts of a model: as many of a token, D, and the width of one."""

  name: str
  num_experts: int
  num_active: int
  embed_dim: int
  ffw_dim: int
  weight_dtypes: tuple[str, ...]


_MODELS = (
  _Model('qwen3-30b-a3b', 128, 8, 2048, 768, ('int4', 'int8')),
  _Model('qwen3-235b-a22b', 128, 8, 4096, 1536, ('float8_e4m3fn',)),
  _Model('gpt-oss-20b', 32, 4, 2880, 2880, ('mxfp4',)),
  _Model('gpt-oss-120b', 128, 4, 2880, 2880, ('mxfp4',)),
)


@model_shapes.once_each
def arg_specs() -> Iterator[tuple[str, ArgSpec]]:
  """Yields models and their shapes, the same ones several times."""
  for model, shards in itertools.product(_MODELS, (1, 8)):
    for weight_dtype, num_tokens in itertools.product(
      model.weight_dtypes, _NUM_TOKENS
    ):
      most = 32 if weight_dtype == 'mxfp4' else 128
      group = math.gcd(model.ffw_dim, most)
      # Whole groups on each device.
      ffw_dim = math.ceil(model.ffw_dim / (shards * group)) * group
      for name, sizes in {
        'gate': (model.embed_dim, ffw_dim, math.gcd(model.embed_dim, most)),
        'down': (ffw_dim, model.embed_dim, group),
      }.items():
        yield (
          f'{model.name}/tp{shards}/{name}',
          _spec(model, sizes, weight_dtype, num_tokens),
        )


def _spec(model, sizes, weight_dtype, num_tokens) -> ArgSpec:
  num_inputs, num_outputs, group_size = sizes
  num_rows = num_tokens * model.num_active
  return ArgSpec(
    name=(
      f'R{num_rows} bfloat16 x {weight_dtype}'
      f'[{model.num_experts}, {num_inputs}, {num_outputs}]'
    ),
    num_rows=num_rows,
    num_experts=model.num_experts,
    num_inputs=num_inputs,
    num_outputs=num_outputs,
    group_size=num_inputs if weight_dtype == 'int8' else group_size,
    dtype='bfloat16',
    weight_dtype=weight_dtype,
  )
