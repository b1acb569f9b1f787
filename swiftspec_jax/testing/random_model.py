"""A model of any configuration with random weights."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding
from swiftspec_jax.testing.byte_tokenizer import byte_tokenizer


def random_model(
  config: ModelConfig,
  *,
  seed: int = 0,
  name: str = 'random',
  dtype: jax.typing.DTypeLike = jnp.float32,
  devices: Sequence[jax.Device] | None = None,
  sequence_devices: int = 1,
) -> Model:
  """Returns a model with random weights and a byte tokenizer.

  Args:
    config: configuration with a vocabulary of at least 262 tokens.
    seed: seed of the weights, which are the same for any number of devices.
    name: name for messages and results.
    dtype: dtype of weights and cache.
    devices: same as in `swiftspec_jax.load`.
    sequence_devices: same as in `swiftspec_jax.load`.
  """
  mesh = sharding.make_mesh(devices, sequence_devices)
  config = dataclasses.replace(
    config,
    num_shards=mesh.devices.size,
    num_sequence_shards=sequence_devices,
  )
  return Model(
    name=name,
    config=config,
    params=params_lib.random_params(jax.random.key(seed), config, dtype, mesh),
    dtype=jnp.dtype(dtype),
    mesh=mesh,
    tokenizer=byte_tokenizer(config.vocab_size),
  )
