"""Reads model directories in Hugging Face layout."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import safetensors_file, torch_file
from swiftspec_jax.checkpoint.quantized import (
  compressed_int8,
  float8,
  mxfp4,
  packed_int4,
  quantization_config,
)
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.families import gemma4
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix
from swiftspec_jax.models.params import Params
from swiftspec_jax.runtime import input_files

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
# `weight_dtype` by `quant_method`; llm-compressor's says more.
_METHODS = {'awq': 'int4', 'gptq': 'int4', 'fp8': 'float8', 'mxfp4': 'mxfp4'}
_CHECKS = {
  'int8': compressed_int8.check,
  'int4': packed_int4.packing_of,
  'float8': float8.block_of,
  'mxfp4': mxfp4.check,
}


def read_config(directory: pathlib.Path) -> ModelConfig:
  """Returns the configuration of a directory.

  EOS tokens come from `generation_config.json` where there is one: chat
  models name their end-of-turn tokens there. `end_token_ids` has the others.

  Raises:
    UserError: a missing or unreadable config, or an unknown architecture.
  """
  values = read_json(directory / 'config.json')
  kind = values.get('model_type')
  unknown = f'{directory}: unknown architecture'
  errors.check_known(unknown, kind, families.supported())
  generation = directory / 'generation_config.json'
  if generation.exists():
    eos = read_json(generation).get('eos_token_id')
    values['eos_token_id'] = values.get('eos_token_id') if eos is None else eos
  path = directory / 'config.json'
  weight_dtype = _stored_dtype(values)
  if weight_dtype is not None:
    with errors.explained(f'{path}: ', errors.UserError):
      _CHECKS[weight_dtype](values)
    values = quantization_config.without(values)
  config = config_of(path, values)
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
  wrong = huggingface_hub.errors.StrictDataclassError
  with errors.explained(f'{path}: ', (wrong, KeyError, TypeError, ValueError)):
    full = transformers.AutoConfig.for_model(**known).to_dict()
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
  if not path.exists():
    raise errors.UserError(f'{path} is missing; a model directory needs it')
  return input_files.read_json(path)


def read_params(
  directory: pathlib.Path, config: ModelConfig, place: families.Place
) -> Params:
  """Returns the parameters as `place` puts them, in the dtypes of the files.

  Raises:
    UserError: missing, cut or contradicting weights.
  """
  values = read_json(directory / 'config.json')
  stored, tensors = _stored_dtype(values), _Tensors(directory)
  block = float8.block_of(values) if stored == 'float8' else None
  # What is not a matrix of a layer is widened.
  get, read = functools.partial(_widened, tensors, block), None
  if stored is not None and stored == config.weight_dtype:
    place = functools.partial(_place_as_stored, place)
    if stored == 'mxfp4':
      get = functools.partial(mxfp4.stored, tensors)
    elif stored == 'int8':
      read = functools.partial(compressed_int8.stored, tensors)
    elif stored == 'float8':
      read = functools.partial(float8.stored, tensors, block)
    else:
      packing = packed_int4.packing_of(values)
      read = packed_int4.Reader(tensors, packing, config).read
  return families.params_from_hf(
    functools.partial(families.get_checked, get),
    config,
    families.FAMILIES[config.family].norm_offset,
    place,
    read,
  )


def _place_as_stored(
  place: families.Place, arrays: Params, specs: Params
) -> Params:
  """Places arrays, but quantizes none that is not quantized already."""

  def as_stored(array, spec):
    is_stored = isinstance(array, StoredMatrix)
    return spec if is_stored else dataclasses.replace(spec, scheme=None)

  return place(arrays, jax.tree.map(as_stored, arrays, specs))


def _stored_dtype(values: Mapping[str, Any]) -> str | None:
  """Returns the `weight_dtype` of a checkpoint; None if it has none."""
  if gemma4.has_experts(values.get('text_config', values)):
    return None  # its layouts are not known, and so refused
  options = quantization_config.options_of(values)
  method = options.get('quant_method')
  return quantization_config.kind_of(options) or _METHODS.get(method)


def open_tensors(
  directory: pathlib.Path,
) -> tuple[Callable[[str], np.ndarray], list[str]]:
  """Returns a function from tensor name to array, and all names.

  Raises:
    UserError: files are missing or cut; so does the function, of a tensor.
  """
  tensors = _Tensors(directory)
  return functools.partial(_widened, tensors, None), list(tensors)


def _widened(
  tensors: Mapping[str, np.ndarray], block: float8.Block | None, name: str
) -> np.ndarray:
  """Returns a tensor without scales; those of float8 are of a block each."""
  if f'{name}_blocks' in tensors:
    return mxfp4.widened(tensors, name)
  tensor = float8.dequantized(tensors, block, name)
  if tensor.dtype == np.int8:
    raise errors.UserError(
      f'tensor {name} is int8, which is supported in layers only; take a '
      'checkpoint that names it under "ignore"'
    )
  return tensor


class _Tensors(Mapping[str, np.ndarray]):
  """The tensors of a directory as they are stored, under several names."""

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    self._read: dict[str, Callable[[], np.ndarray]] = {}
    if torch_file.is_in(directory) and not [*directory.glob('*.safetensors')]:
      for name, array in torch_file.read(directory).items():
        self._read[name] = functools.partial(np.asarray, array)
      return
    for name in sorted(_file_names(directory)):
      self._read |= safetensors_file.tensors_of(directory / name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._read)

  def __len__(self) -> int:
    return len(self._read)

  def __contains__(self, name: str) -> bool:
    return self._stored_name(name) is not None

  def __getitem__(self, name: str) -> np.ndarray:
    """Returns a tensor; raises UserError if there is none."""
    stored_name = self._stored_name(name)
    if stored_name is None:
      raise errors.UserError(
        f'{self._directory}: tensor {name} is missing; the weights are not '
        'complete or belong to another architecture'
      )
    return self._read[stored_name]()

  def _stored_name(self, name: str) -> str | None:
    # Some checkpoints of a bare decoder lack the prefix, those of one beside a
    # vision tower have more, in two layouts.
    bare = name.removeprefix('model.')
    candidates = (
      name,
      bare,
      f'language_model.{name}',
      f'model.language_model.{bare}',
    )
    return next((x for x in candidates if x in self._read), None)


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
