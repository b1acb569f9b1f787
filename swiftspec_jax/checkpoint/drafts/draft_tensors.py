"""Files of drafts as others publish them: tensors by name, and refusals."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf, safetensors_file
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families, layers
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.runtime import atomic_file

# A draft's configuration, and what reads its host arrays for that, which may
# have more devices.
Draft = tuple[ModelConfig, Callable[[ModelConfig], Params]]

# Tensors that nothing is lost without: t2d follows from d2t, and ReDrafter uses
# the norm of embeddings nowhere.
_IGNORED = ('t2d', 'emb_norm.weight')


def refuse(path: pathlib.Path, name: str, value: Any, reason: str) -> NoReturn:
  """Raises UserError for an entry of the file at `path`."""
  raise errors.UserError(f'{path}: {name}={value!r} is not supported; {reason}')


def write(
  path: pathlib.Path,
  tensors: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a draft: a file of tensors, and config.json beside it.

  Raises:
    UserError: they cannot be written.
  """
  directory = path.parent
  with errors.explained(f'cannot write {directory}: ', safetensors_file.ERRORS):
    directory.mkdir(parents=True, exist_ok=True)
    safetensors_file.write(path, tensors, metadata)
    with atomic_file.replacing(directory / 'config.json') as partial:
      partial.write_text(json.dumps(config, indent=2) + '\n')


def table_of(target: Model, name: str) -> jax.Array:
  """Returns the embedding or unembedding [V, D] of a target, padded."""
  table = target.params[name]
  return table.dequantized() if isinstance(table, layers.TABLES) else table


class Tensors:
  """The tensors of a draft by the names of `families.layer_from_hf`."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    get, names = hf.open_tensors(directory)
    self._get = get
    self._by_name = {
      name.replace('midlayer.', 'layers.0.'): name for name in names
    }
    self._unread = set(self._by_name)

  def __contains__(self, name: str) -> bool:
    return name in self._by_name

  def check_all_read(self, kind: str, start: str = '') -> None:
    """Raises UserError if there are tensors that nobody has asked for.

    Args:
      kind: name of the kind of draft, for the message.
      start: beginning of the names that matter.
    """
    unread = {name for name in self._unread if name.startswith(start)}
    unknown = unread - set(_IGNORED)
    if unknown:
      raise errors.UserError(
        f'{self.directory}: tensor {min(unknown)} is not of {kind} that is '
        'supported'
      )

  def mask(self, name: str) -> np.ndarray:
    """Returns a bool tensor of any length."""
    return np.asarray(self._get(self._by_name[name]), bool)

  def get(self, name: str, *shape: int) -> np.ndarray:
    """Returns a tensor; raises UserError if it is missing or has no `shape`."""
    self._unread.discard(name)
    stored_name = self._by_name.get(name, name)
    return families.get_checked(self._get, stored_name, *shape)

  def norm(self, name: str, size: int) -> np.ndarray:
    """Returns the scales f32[size] of a norm, as `get` does."""
    return self.get(f'{name}.weight', size).astype(np.float32)


def are_ascending(token_ids: np.ndarray, vocab_size: int) -> bool:
  """Whether ids, one at least, ascend within a vocabulary."""
  edges = np.array([-1]), token_ids, np.array([vocab_size])
  return bool((np.diff(np.concatenate(edges)) > 0).all())


def output_token_ids(tensors: Tensors, config: ModelConfig) -> np.ndarray:
  """Returns i32[V'] ascending token ids of the logits.

  `d2t` holds what is added to the number of a logit; some files hold the ids
  themselves. `t2d`, the mask of these ids, tells which.
  """
  size = config.num_logits
  if 'd2t' not in tensors:
    if size != config.vocab_size:
      tensors.get('d2t', size)  # it is missing
    return np.arange(size, dtype=np.int32)
  stored = tensors.get('d2t', size).astype(np.int64)
  candidates = [stored + np.arange(size), stored]
  if 't2d' in tensors:
    expected = np.flatnonzero(tensors.mask('t2d'))
    candidates = [ids for ids in candidates if np.array_equal(ids, expected)]
  for ids in candidates:
    if are_ascending(ids, config.vocab_size):
      return ids.astype(np.int32)
  raise errors.UserError(
    f'{tensors.directory}: d2t does not name {size} ascending tokens of '
    f'{config.vocab_size}, those of t2d; the file is damaged or belongs to '
    'another vocabulary'
  )
