"""The gated activation by the implementation that suits devices and shape.

Legend: B rows, T tokens, D embed, F ffw.
"""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, registry, trials, tuning
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
  local = gate_up.shape
  if sharding is not None:
    local = sharding.shard_shape(local)
  spec = arg_specs.ArgSpec(
    name=f'x {x.dtype}{list(rows)}, gate_up {list(local)}, {activation}',
    num_tokens=rows[0],
    embed_dim=rows[1],
    ffw_dim=local[2],
    activation=activation,
    dtype=x.dtype.name,
  )
  chosen = dispatch.choose(
    'swiglu',
    spec.name,
    implementation,
    dispatch.platform_of(sharding),
    registry.checks('swiglu', rows, x.dtype),
    trial=functools.partial(trials.verdict, 'swiglu', spec, sharding),
  )
  if chosen == dispatch.REFERENCE:
    return reference.swiglu(x, gate_up, activation=activation)
  call = registry.function('swiglu', chosen)
  call = functools.partial(call, activation=activation)
  call = tuning.tuned('swiglu', chosen, call, sharding)
  if sharding is not None:
    columns = sharding.spec[2]
    call = jax.shard_map(
      call,
      mesh=sharding.mesh,
      in_specs=(P(), P(None, None, columns)),
      out_specs=P(None, columns),
      check_vma=False,
    )
  return call(x.reshape(rows), gate_up).reshape(*x.shape[:2], -1)
