"""Which implementation a kernel takes that needs all logits of a token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

from kernels_pallas import calls, registry, tuning
from kernels_pallas.vocabulary import vocabulary_spec


def choose(
  kernel: str,
  implementation: str,
  sharding: Sharding | None,
  spec: vocabulary_spec.VocabularySpec,
  logits: jax.Array,
) -> Callable[..., Any]:
  """Returns the function to call, with the tiles that were measured for it.

  Args:
    kernel: name of the kernel. `check` of its modules takes the logits.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Several devices take the
      reference: they share the vocabulary, for which there is no kernel.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    spec: shapes and options of the call.
    logits: [B, T, V].

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  num_devices = 1 if sharding is None else len(sharding.device_set)
  refused = {}
  if num_devices > 1:
    implementation = 'auto'
    reason = f'the vocabulary is shared by {num_devices} devices'
    refused = dict.fromkeys(registry.implementations(kernel), reason)
  chosen = calls.choose(
    kernel,
    dataclasses.replace(spec, name=f'{spec.name} on {num_devices} devices'),
    implementation,
    sharding,
    logits,
    **refused,
  )
  call = registry.function(kernel, chosen)
  return tuning.tuned(kernel, chosen, call, sharding)
