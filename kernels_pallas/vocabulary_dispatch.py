"""Which implementation a kernel takes that needs all logits of a token."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Sharding

from kernels_pallas import dispatch, trials, tuning, vocabulary_spec


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
    kernel: its name, and that of the function in each module.
    implementation: one of `dispatch.IMPLEMENTATIONS`. Several devices share
      the vocabulary, for which there is no kernel: they take the reference.
    sharding: of an array on the same devices; None is JAX's default device.
    spec: of the call.
    dtype: of the logits.
    backends: by name, the reference among them; the `check` of the others takes
      shape and dtype.

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
