"""The gated activation by the implementation that suits devices and shape.

Legend: B rows, T tokens, D embed, F ffw.
"""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import calls, dispatch
from kernels_pallas.swiglu import arg_specs, reference


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
    implementation: name of the code to run, one of
      `dispatch.IMPLEMENTATIONS`.
    sharding: sharding of gate_up, whose last axis alone may be sharded. None
      means JAX's default device.

  Returns:
    [B, T, F].

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  rows = (x.shape[0] * x.shape[1], x.shape[2])
  local = calls.local_shape(gate_up, sharding)
  spec = arg_specs.ArgSpec(
    name=f'x {x.dtype}{list(rows)}, gate_up {list(local)}, {activation}',
    num_tokens=rows[0],
    embed_dim=rows[1],
    ffw_dim=local[2],
    activation=activation,
    dtype=x.dtype.name,
  )
  chosen = calls.choose('swiglu', spec, implementation, sharding, rows, x.dtype)
  if chosen == dispatch.REFERENCE:
    return reference.swiglu(x, gate_up, activation=activation)
  *_, columns = calls.axes_of(sharding, 3)
  hidden = calls.run(
    'swiglu',
    chosen,
    (x.reshape(rows), gate_up),
    {'activation': activation},
    sharding,
    (P(), P(None, None, columns)),
    P(None, columns),
  )
  return hidden.reshape(*x.shape[:2], -1)
