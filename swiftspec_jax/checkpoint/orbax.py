"""Saves and restores models in the project's own format.

A checkpoint is a directory with the parameters (orbax), `model_config.json`
and the tokenizer's files.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import uuid

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding

_CONFIG = 'model_config.json'
_PARAMS = 'params'


def is_checkpoint(directory: pathlib.Path) -> bool:
  """Whether `save` wrote the directory."""
  return (directory / _CONFIG).exists()


def save(model: Model, directory: str | os.PathLike) -> None:
  """Saves a model so that `load(directory)` restores it.

  The directory appears complete or not at all.

  Raises:
    UserError: the directory exists already, or cannot be written, or the model
      is sharded or quantized.
  """
  directory = pathlib.Path(directory).absolute()
  if directory.exists():
    raise errors.UserError(
      f'{directory} exists already; name a new directory to save to'
    )
  if model.config.num_shards != 1:
    raise errors.UserError(
      f'{model.name} is padded for {model.config.num_shards} devices; load it '
      'on one device to save it'
    )
  if model.config.weight_dtype is not None:
    raise errors.UserError(
      f'{model.name} is quantized to {model.config.weight_dtype}; load it '
      'without weight_dtype to save it (as "wide" if the checkpoint is of few '
      'bits), and quantize it when it is loaded again'
    )
  import orbax.checkpoint as ocp  # here, as it takes long

  partial = directory.with_name(f'.{directory.name}-{uuid.uuid4().hex}')
  try:
    partial.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(partial / _PARAMS, transposed.undone(model.params))
    model.tokenizer.save_pretrained(partial)
    (partial / _CONFIG).write_text(json.dumps(model.config.to_json(), indent=2))
    partial.replace(directory)
  except OSError as error:
    raise errors.UserError(f'cannot write {directory}: {error}') from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def read_config(directory: pathlib.Path) -> ModelConfig:
  """Returns the configuration of a checkpoint.

  Raises:
    UserError: it is damaged, or of another version.
  """
  path, kinds = directory / _CONFIG, (OSError, TypeError, ValueError)
  remedy = '; save the model again'
  with errors.explained(f'{path} is not usable: ', kinds, remedy):
    return ModelConfig.from_json(json.loads(path.read_text()))


def read_params(
  directory: pathlib.Path, config: ModelConfig, place: families.Place
) -> params_lib.Params:
  """Returns the parameters as `place` puts them.

  Raises:
    UserError: missing or cut weights.
  """
  import orbax.checkpoint as ocp  # here, as it takes long

  path = directory.absolute() / _PARAMS
  saved = dataclasses.replace(config, num_shards=1, weight_dtype=None)
  process = jax.process_index()
  # Each process reads for itself, and others may read another model.
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process,
    active_processes={process},
    barrier_sync_key_prefix=str(process),
  )
  failed = f'{path} is not a complete checkpoint: '
  with (
    errors.explained(failed, (OSError, ValueError, KeyError)),
    ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer,
  ):
    metadata = checkpointer.metadata(path).item_metadata
    if metadata is None:
      raise FileNotFoundError('there are no parameters')
    abstract = params_lib.abstract_params(
      saved, metadata.tree['embedding'].dtype, sharding.make_mesh()
    )
    restored = checkpointer.restore(path, abstract)
  arrays = jax.tree.map(np.asarray, restored)
  return place(arrays, params_lib.param_specs(config))
