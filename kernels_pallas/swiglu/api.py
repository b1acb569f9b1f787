"""The gated activation by the implementation that suits devices and shape.

Legend: B rows, T tokens, D embed, F ffw.
"""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import calls
from kernels_pallas.swiglu import arg_specs


def swiglu(
  x: jax.Array,
  gate_up: jax.Array,
  *,
  activation: str,
  implementation: str = 'auto',
  sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns act(x gate) * (x up).

  Args:
    x: [B, T, D], bfloat16 or float32 for kernels.
    gate_up: [D, 2, F] of the same dtype, gate first.
    activation: name of act, one of `reference.ACTIVATIONS`.
    implementation: one of `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of gate_up, whose last axis alone may be sharded. None
      means JAX's default device.

  Returns:
    [B, T, F].

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  rows = x.reshape(-1, x.shape[2])
  local = calls.local_part(gate_up, sharding).shape
  spec = arg_specs.ArgSpec(
    name=f'x {x.dtype}{list(rows.shape)}, gate_up {list(local)}, {activation}',
    num_tokens=rows.shape[0],
    embed_dim=rows.shape[1],
    ffw_dim=local[2],
    activation=activation,
    dtype=x.dtype.name,
  )
  chosen = calls.choose('swiglu', spec, implementation, sharding, rows)
  *_, columns = calls.axes_of(sharding, 3)
  hidden = calls.run(
    'swiglu',
    chosen,
    (rows, gate_up),
    {'activation': activation},
    sharding,
    (P(), P(None, None, columns)),
    P(None, columns),
  )
  return hidden.reshape(*x.shape[:2], -1)
