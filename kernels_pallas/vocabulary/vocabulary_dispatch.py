"""Which implementation a kernel takes that needs all logits of a token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

from kernels_pallas import dispatch, registry, trials, tuning
from kernels_pallas.vocabulary import vocabulary_spec


def choose(
  kernel: str,
  implementation: str,
  sharding: Sharding | None,
  spec: vocabulary_spec.VocabularySpec,
  dtype: jax.typing.DTypeLike,
) -> Callable[..., Any]:
  """Returns the function to call, with the tiles that were measured for it.

  Args:
    kernel: name of the kernel. `check` of its modules takes shape and dtype.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Several devices take the
      reference: they share the vocabulary, for which there is no kernel.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    spec: shapes and options of the call.
    dtype: dtype of the logits.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  num_devices = 1 if sharding is None else len(sharding.device_set)

  def refuse():
    raise NotImplementedError(
      f'the vocabulary is shared by {num_devices} devices'
    )

  checks = registry.checks(kernel, spec.logits().shape, dtype)
  if num_devices > 1:
    checks = dict.fromkeys(checks, refuse)
  chosen = dispatch.choose(
    kernel,
    f'{spec.name} on {num_devices} devices',
    implementation if num_devices == 1 else 'auto',
    dispatch.platform_of(sharding),
    checks,
    trial=functools.partial(trials.verdict, kernel, spec, sharding),
  )
  call = registry.function(kernel, chosen)
  return tuning.tuned(kernel, chosen, call, sharding)
