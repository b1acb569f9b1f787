"""Which implementation a kernel takes that needs all logits of a token."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Sharding

from kernels_pallas import dispatch, trials, tuning
from kernels_pallas.vocabulary import vocabulary_spec


def choose(
  kernel: str,
  implementation: str,
  sharding: Sharding | None,
  spec: vocabulary_spec.VocabularySpec,
  dtype: jax.typing.DTypeLike,
  backends: Mapping[str, ModuleType],
) -> Callable[..., Any]:
  """Returns the function to call, with the tiles that were measured for it.

  Args:
    kernel: name of the kernel, and of the function in each module.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Several devices take the
      reference: they share the vocabulary, for which there is no kernel.
    sharding: sharding of any array on the devices of the call. None means
      JAX's default device.
    spec: shapes and options of the call.
    dtype: dtype of the logits.
    backends: modules by name, the reference among them. Those of kernels have a
      function `check` of shape and dtype.

  Raises:
    NotImplementedError: `implementation` cannot do it; never with 'auto'.
  """
  num_devices = 1 if sharding is None else len(sharding.device_set)

  def check(backend):
    if num_devices > 1:
      raise NotImplementedError(
        f'the vocabulary is shared by {num_devices} devices'
      )
    backend.check(spec.logits().shape, dtype)

  chosen = dispatch.choose(
    kernel,
    f'{spec.name} on {num_devices} devices',
    implementation if num_devices == 1 else 'auto',
    dispatch.platform_of(sharding),
    {
      name: functools.partial(check, backend)
      for name, backend in backends.items()
      if name != dispatch.REFERENCE
    },
    trial=functools.partial(trials.verdict, kernel, spec, sharding),
  )
  return tuning.tuned(
    kernel, chosen, getattr(backends[chosen], kernel), sharding
  )
