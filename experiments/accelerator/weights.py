"""Models of the report: real weights where they are, random ones elsewhere."""

import functools

import jax
import jax.numpy as jnp

import swiftspec_jax as ss
from experiments.accelerator.sections import Settings
from swiftspec_jax import testing
from swiftspec_jax.checkpoint import builtin
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.runtime import sharding

SMOLLM2 = 'smollm2-135m-instruct'
DRAFT = builtin.draft_for(SMOLLM2)


def find(settings: Settings) -> str | None:
  """Returns the path or name of SmolLM2-135M; None if it is not here."""
  if settings.model is not None:
    return settings.model
  path = builtin.cache_dir() / 'models' / f'{SMOLLM2}.gguf'
  return SMOLLM2 if path.exists() else None


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
