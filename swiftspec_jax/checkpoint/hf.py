"""Reads model directories in Hugging Face layout."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import safetensors_file, stored_layers, torch_file
from swiftspec_jax.checkpoint.quantized import (
  compressed_int8,
  float8,
  mxfp4,
  packed_int4,
  quantization_config,
)
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.families import gemma4, vision_families
from swiftspec_jax.models.params import Params

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'


def read_config(directory: pathlib.Path) -> ModelConfig:
  """Returns the configuration of a directory.

  EOS tokens come from `generation_config.json` where there is one: chat
  models name their end-of-turn tokens there. `end_token_ids` has the others.

  Raises:
    UserError: a missing or unreadable config, or an unknown architecture.
  """
  values = read_json(directory / 'config.json')
  kind = values.get('model_type')
  if kind not in families.supported():
    raise errors.UserError(
      f'{directory}: unknown architecture {kind!r}; supported: '
      f'{", ".join(families.supported())}'
    )
  generation = directory / 'generation_config.json'
  if generation.exists():
    eos = read_json(generation).get('eos_token_id')
    values['eos_token_id'] = values.get('eos_token_id') if eos is None else eos
  path = directory / 'config.json'
  weight_dtype = _stored_dtype(path, values)
  if weight_dtype is not None:
    values = quantization_config.without(values)
  config = config_of(path, values)
  if config.vision:
    preprocessing = vision_families.preprocessing_from_hf(
      read_json(directory / 'preprocessor_config.json'),
      config.vision.image_size,
    )
    vision = dataclasses.replace(config.vision, **preprocessing)
    config = dataclasses.replace(config, vision=vision)
  return dataclasses.replace(config, weight_dtype=weight_dtype)


def end_token_ids(directory: pathlib.Path) -> list[int]:
  """Returns the end tokens of `config.json`; it can be older than the others.

  Raises:
    UserError: the file is missing or unreadable.
  """
  values = read_json(directory / 'config.json')
  found: list[int] = []
  for part in (values, values.get('text_config') or {}):
    named = part.get('eos_token_id')
    found += [named] if isinstance(named, int) else named or []
  return found


def config_of(path: pathlib.Path, values: Mapping[str, Any]) -> ModelConfig:
  """Returns the configuration of a model.

  Args:
    path: file that the values are from, for messages.
    values: entries of the file, in the form of `config.json`.

  Raises:
    UserError: an entry is not understood.
  """
  import huggingface_hub.errors  # here, as these take long
  import transformers

  # transformers fills in defaults and translates configs of older releases.
  kind = values.get('model_type')
  # Some families are only in the code that comes with the weights.
  known = {**values, 'model_type': families.SAME_CONFIG.get(kind, kind)}
  try:
    full = transformers.AutoConfig.for_model(**known).to_dict()
  except (
    huggingface_hub.errors.StrictDataclassError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    raise errors.UserError(f'{path}: {error}') from error
  return families.config_from_hf({**full, 'model_type': kind})


def values_of(directory: pathlib.Path) -> dict:
  """Returns the object in config.json, an empty one without the file."""
  path = directory / 'config.json'
  return read_json(path) if path.exists() else {}


def read_json(path: pathlib.Path) -> dict:
  """Returns the object in a file.

  Raises:
    UserError: the file is missing or holds something else.
  """
  try:
    values = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise errors.UserError(
      f'{path} is missing; a model directory needs it'
    ) from error
  except ValueError as error:
    raise errors.UserError(f'{path} is not valid JSON: {error}') from error
  if not isinstance(values, dict):
    raise errors.UserError(f'{path} must be a JSON object, got {values!r}')
  return values


def read_params(
  directory: pathlib.Path, config: ModelConfig, place: families.Place
) -> Params:
  """Returns the parameters as `place` puts them, in the dtypes of the files.

  Raises:
    UserError: missing, cut or contradicting weights.
  """
  path = directory / 'config.json'
  values = read_json(path)
  # What is not a matrix of a layer is widened.
  get, _ = open_tensors(directory, float8.block_of(path, values))
  read_matrices = None
  stored = _stored_dtype(path, values)
  if stored is not None and stored == config.weight_dtype:
    place = stored_layers.place_as_stored(place)
    get_stored, names = _open_stored(directory)
    has = functools.partial(_is_in, frozenset(names))
    if stored == 'mxfp4':
      get = functools.partial(mxfp4.stored, get_stored, has)
    else:
      read = _reader(path, values, config, get_stored, has)
      read_matrices = functools.partial(stored_layers.read, config, read)
    if stored == 'int8':
      get = functools.partial(compressed_int8.refused, get)
  return families.params_from_hf(
    get,
    config,
    families.FAMILIES[config.family].norm_offset,
    place,
    read_matrices,
  )


def _stored_dtype(path: pathlib.Path, values: Mapping[str, Any]) -> str | None:
  """Returns the `weight_dtype` of a checkpoint; None if it has none."""
  if gemma4.has_experts(values.get('text_config', values)):
    return None  # its layouts are not known, and so refused
  kinds = {
    'int8': compressed_int8.is_used(path, values),
    'int4': packed_int4.packing_of(path, values) is not None,
    'float8': float8.block_of(path, values) is not None,
    'mxfp4': mxfp4.is_used(path, values),
  }
  return next((kind for kind, is_used in kinds.items() if is_used), None)


def _reader(
  path: pathlib.Path,
  values: Mapping[str, Any],
  config: ModelConfig,
  get: Callable[[str], np.ndarray],
  has: Callable[[str], bool],
) -> stored_layers.Read:
  """Returns what reads the matrices of layers as they are stored."""
  packing = packed_int4.packing_of(path, values)
  if packing is not None:
    return packed_int4.Reader(
      get=get, has=has, packing=packing, config=config
    ).read
  if compressed_int8.is_used(path, values):
    return functools.partial(compressed_int8.stored, get, has)
  block = float8.block_of(path, values)
  return functools.partial(float8.stored, get, has, block)


def open_tensors(
  directory: pathlib.Path, block: float8.Block | None = None
) -> tuple[Callable[[str], np.ndarray], list[str]]:
  """Returns a function from tensor name to array, and all names.

  Args:
    directory: folder of the checkpoint.
    block: sizes of what shares a scale, where tensors are stored as float8.

  Raises:
    UserError: files are missing or cut; so does the function, of a tensor.
  """
  get, names = _open_stored(directory)
  has = functools.partial(_is_in, frozenset(names))
  get = functools.partial(float8.dequantized, get, has, block)
  return functools.partial(mxfp4.widened, get, has), names


def _open_stored(
  directory: pathlib.Path,
) -> tuple[Callable[[str], np.ndarray], list[str]]:
  """Returns what `open_tensors` does, with tensors as they are stored."""
  if not list(directory.glob('*.safetensors')) and torch_file.is_in(directory):
    files = torch_file.read(directory)
    return _getter(directory, files.__getitem__, files), list(files)
  tensors = {}
  for name in sorted(_file_names(directory)):
    tensors.update(safetensors_file.tensors_of(directory / name))
  return _getter(directory, lambda name: tensors[name](), tensors), [*tensors]


def _file_names(directory: pathlib.Path) -> set[str]:
  if not (directory / _INDEX).exists():
    return {_SINGLE}
  weight_map = read_json(directory / _INDEX).get('weight_map')
  if not isinstance(weight_map, dict):
    raise errors.UserError(f'{directory / _INDEX} has no weight_map')
  names = set(weight_map.values())
  # As in transformers: an index of other files is one of an older checkpoint.
  is_old = _SINGLE not in names and (directory / _SINGLE).exists()
  return {_SINGLE} if is_old else names


def _getter(
  directory: pathlib.Path,
  read: Callable[[str], np.ndarray],
  names: Container[str],
) -> Callable[[str], np.ndarray]:
  """Returns `read` that looks for other names and raises UserErrors."""

  def get(name: str) -> np.ndarray:
    stored_name = _stored_name(name, names)
    if stored_name is None:
      raise errors.UserError(
        f'{directory}: tensor {name} is missing; the weights are not complete '
        'or belong to another architecture'
      )
    return read(stored_name)

  return get


def _is_in(names: Container[str], name: str) -> bool:
  return _stored_name(name, names) is not None


def _stored_name(name: str, names: Container[str]) -> str | None:
  # Some checkpoints of a bare decoder lack the prefix, those of one that reads
  # images have more, in two layouts.
  bare, tower = name.removeprefix('model.'), 'vision_tower.'
  candidates = (
    name,
    bare,
    f'language_model.{name}',
    f'model.language_model.{bare}',
    name.replace(tower, f'{tower}vision_model.'),
    f'model.{name}',
    f'model.{name}'.replace(tower, f'{tower}vision_model.'),
  )
  return next((name for name in candidates if name in names), None)
