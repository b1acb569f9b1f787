"""Models of the report: real weights where they are, random ones elsewhere."""

import functools

import jax
import jax.numpy as jnp

import swiftspec_jax as ss
from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from swiftspec_jax import testing
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.runtime import sharding

_SMOLLM2 = 'smollm2-135m-instruct'
DRAFT = builtin.draft_for(_SMOLLM2)


def find(settings: Settings) -> str | None:
  """Returns the path or name of SmolLM2-135M; None if it is not here."""
  if settings.model is not None:
    return settings.model
  path = builtin.cache_dir() / 'models' / f'{_SMOLLM2}.gguf'
  return _SMOLLM2 if path.exists() else None


def missing(name: str) -> Job:
  """Returns a job that says that there are no weights."""
  row = Row(
    status=rows_lib.NO_WEIGHTS,
    reason=f'{_SMOLLM2} is not in {builtin.cache_dir()}; give --model=PATH',
  )
  return Job(name=name, run=lambda: [row])


def random_model(config: ss.ModelConfig, name: str, dtype: str) -> ss.Model:
  """Returns a model whose random weights never were on the host.

  Args:
    config: configuration whose sizes need no padding.
    name: name for messages.
    dtype: dtype of weights and cache.
  """
  mesh = sharding.make_mesh(jax.devices()[:1])
  specs, treedef = jax.tree.flatten(params_lib.param_specs(config))
  keys = jax.random.split(jax.random.key(0), len(specs))
  arrays = [
    _random(key, spec.shape, spec.init_scale, dtype)
    for key, spec in zip(keys, specs, strict=True)
  ]
  return ss.Model(
    name=name,
    config=config,
    params=params_lib.place_params(
      treedef.unflatten(arrays), treedef.unflatten(specs), dtype, mesh
    ),
    dtype=jnp.dtype(dtype),
    mesh=mesh,
    tokenizer=testing.byte_tokenizer(config.vocab_size),
  )


@functools.partial(jax.jit, static_argnums=(1, 3))
def _random(key, shape, scale, dtype):
  if scale is None:
    return jnp.ones(shape, jnp.float32)
  return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
