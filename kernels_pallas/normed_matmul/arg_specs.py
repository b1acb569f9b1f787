"""Shapes of products after norms in real models, for compilers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.quantized_matmul import arg_specs as product_specs

_EPSILON = 1e-5
_MATRICES = ('qkv', 'gate_up')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(product_specs.ArgSpec):
  """The arguments of one call, on one device, as of the product.

  Attributes:
    epsilon: number that is added to the mean square.
  """

  epsilon: float = _EPSILON

  def options(self) -> dict[str, Any]:
    return {**super().options(), 'epsilon': self.epsilon}

  def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    x, *weight = super().arrays()
    scale = jax.ShapeDtypeStruct((self.num_inputs,), jnp.float32)
    return (x, x, scale, *weight)

  @property
  def num_bytes(self) -> int:
    x = self.arrays()[0]
    return super().num_bytes + 2 * x.size * x.dtype.itemsize


def arg_specs() -> list[ArgSpec]:
  """Returns the shapes of the matrices after a norm."""
  return [
    ArgSpec(**dataclasses.asdict(spec))
    for spec in product_specs.arg_specs(_MATRICES)
  ]
