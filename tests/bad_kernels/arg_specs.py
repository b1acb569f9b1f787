"""The one argument of all kernels of this package."""

import dataclasses

import jax

from kernels_pallas import call_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec(call_spec.CallSpec):
  num_tokens: int
  dtype: str = 'float32'

  def arrays(self):
    return (jax.ShapeDtypeStruct((self.num_tokens, 128), self.dtype),)
