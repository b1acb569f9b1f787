"""Which implementation a kernel takes that needs all logits of a token."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

from kernels_pallas import calls, registry


def choose(
  kernel: str,
  implementation: str,
  sharding: Sharding | None,
  logits: jax.Array,
  name: str,
  **fields: Any,
) -> Callable[..., Any]:
  """Returns the function to call, with the tiles that were measured for it.

  Args:
    kernel: name of the kernel. `check` of its modules takes the logits.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Several devices take the
      reference: they share the vocabulary, for which there is no kernel.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    logits: [B, T, V].
    name: name of the call, for people.
    **fields: the other fields of the kernel's `ArgSpec`.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  num_devices = 1 if sharding is None else len(sharding.device_set)
  refused = {}
  if num_devices > 1:
    implementation = 'auto'
    reason = f'the vocabulary is shared by {num_devices} devices'
    refused = dict.fromkeys(registry.implementations(kernel), reason)
  batch_size, num_tokens, vocab_size = logits.shape
  spec = registry.module(kernel, 'arg_specs').ArgSpec(
    name=f'{name} on {num_devices} devices',
    batch_size=batch_size,
    num_tokens=num_tokens,
    vocab_size=vocab_size,
    **fields,
  )
  chosen = calls.choose(
    kernel,
    spec,
    implementation,
    sharding,
    logits,
    **refused,
  )
  return calls.function(kernel, chosen, {}, sharding)
