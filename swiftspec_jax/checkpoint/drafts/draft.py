"""Reads and writes draft models that belong to a target.

Such a directory holds `config.json` and `draft.safetensors`. The tokenizer is
the target's, and so is the embedding if the draft does not have its own, so a
draft stays small. Parameters are named by their path in the tree, such as
`layers.0.qkv`; one that is stored as int8 has a float16 scale for each row
(all axes but the last), named `<name>:scale`.
"""

import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import safetensors_file
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.model import Model

KIND = 'a draft of the target that its config.json names'
MODEL_TYPE = 'swiftspec_draft'
_CONFIG = 'config.json'
_WEIGHTS = 'draft.safetensors'
_SCALE = ':scale'
_EMBEDDING = 'embedding'
STORED_DTYPES = ('float32', 'float16', 'int8')


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether `save` wrote the directory."""
  return (directory / _WEIGHTS).exists()


def vocabulary_hash(tokenizer: tokenizer_lib.Tokenizer) -> str:
  """Returns the SHA-256 of all tokens in the order of their ids."""
  to_token = tokenizer.backend_tokenizer.id_to_token
  tokens = [to_token(i) for i in range(len(tokenizer))]
  return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def save(
  directory: pathlib.Path,
  config: ModelConfig,
  arrays: params_lib.Params,
  target: Model,
  *,
  stored_dtype: str = 'float16',
  training: dict[str, Any] | None = None,
) -> None:
  """Writes a draft so that `load(directory, draft_of=target)` reads it.

  The files are replaced one by one, each atomically.

  Args:
    directory: folder to write; made if it does not exist.
    config: sizes of the draft, for one device.
    arrays: tree of arrays in the form of `param_specs(config)`, or the
      parameters of a `Model`. Where 'embedding' is missing, the draft takes the
      target's.
    target: model that it drafts for.
    stored_dtype: dtype of the stored weights, one of `STORED_DTYPES`; norms
      stay float32.
    training: record of how it was made, for the reader of config.json.

  Raises:
    UserError: the directory cannot be written.
  """
  stored: dict[str, np.ndarray] = {}
  declared = transposed.undone(arrays)
  for path, array in jax.tree_util.tree_leaves_with_path(declared):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    stored |= _encode(name, np.asarray(array), stored_dtype)
  values = {
    'model_type': MODEL_TYPE,
    'target': target.name,
    'vocabulary_sha256': vocabulary_hash(target.tokenizer),
    'shares_embedding': _EMBEDDING not in arrays,
    'model': config.to_json(),
    'training': training or {},
  }
  draft_tensors.write(directory / _WEIGHTS, stored, values)


def _encode(name, array, stored_dtype) -> dict[str, np.ndarray]:
  if array.dtype.kind == 'i':
    return {name: array.astype(np.int32)}
  array = array.astype(np.float32)
  if array.ndim == 1 or stored_dtype == 'float32':
    return {name: array}
  if stored_dtype == 'float16':
    return {name: array.astype(np.float16)}
  scale = np.abs(array).max(-1, keepdims=True) / 127
  scale = np.maximum(scale, 1e-7).astype(np.float16)
  quantized = np.rint(array / scale.astype(np.float32)).clip(-127, 127)
  return {name: quantized.astype(np.int8), name + _SCALE: scale}


def _arrays(
  directory: pathlib.Path, target: Model, config: ModelConfig
) -> params_lib.Params:
  """Returns host arrays; a missing embedding is the target's."""
  path = directory / _WEIGHTS
  broken = f'{path} is missing or cut short: '
  with errors.explained(broken, safetensors_file.ERRORS, '; write it again'):
    stored = safetensors_numpy.load_file(path)
  if _EMBEDDING not in stored:
    stored[_EMBEDDING] = draft_tensors.table_of(target, _EMBEDDING)

  def get(path_in_tree, _):
    name = jax.tree_util.keystr(path_in_tree, simple=True, separator='.')
    if name not in stored:
      raise errors.UserError(
        f'{path}: {name} is missing; weights and config do not belong together'
      )
    if name + _SCALE not in stored:
      return stored[name]
    return stored[name] * stored[name + _SCALE].astype(np.float32)

  specs = params_lib.param_specs(config)
  arrays = jax.tree_util.tree_map_with_path(get, specs)
  ids, size = arrays.get('output_token_ids'), config.vocab_size
  if ids is not None and not draft_tensors.are_ascending(ids, size):
    raise errors.UserError(
      f'{path}: output_token_ids must ascend from 0 to {size - 1}; the file is '
      'damaged or belongs to another vocabulary'
    )
  return arrays


def open_draft(directory: pathlib.Path, target: Model) -> draft_tensors.Draft:
  """Returns a draft that fits the target.

  Raises:
    UserError: the config is damaged, or the draft belongs to a target with
      another vocabulary or width.
  """
  path = directory / _CONFIG
  kinds = (OSError, ValueError, KeyError, TypeError)
  remedy = '; write the draft again'
  with errors.explained(f'{path} is not usable: ', kinds, remedy):
    values = json.loads(path.read_text())
    config = ModelConfig.from_json(values['model'])
    shares_embedding, its_target = values['shares_embedding'], values['target']
    its_vocabulary = values['vocabulary_sha256']
  if its_vocabulary != vocabulary_hash(target.tokenizer):
    raise errors.UserError(
      f'{directory} is a draft of {its_target}, whose vocabulary is another '
      f'than that of {target.name}; choose a draft of the same family'
    )
  if shares_embedding and config.embed_dim != target.config.embed_dim:
    raise errors.UserError(
      f'{directory} shares the embedding of {its_target} ({config.embed_dim} '
      f'wide); that of {target.name} is {target.config.embed_dim} wide'
    )
  return config, functools.partial(_arrays, directory, target)
