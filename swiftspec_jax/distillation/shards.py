"""Files of samples: written whole or not at all, and checked when read.

A shard is a safetensors file. Legend: n tokens of all groups one after the
other (each: prefix, then its samples), b samples, g groups, K distribution
entries, H width of the features, if there are any.
"""

import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
import safetensors

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import safetensors_file
from swiftspec_jax.distillation import samples as samples_lib
from swiftspec_jax.distillation.samples import Group, Sample
from swiftspec_jax.models.model import Model

FORMAT = 'swiftspec_jax samples 1'
_FEATURES = 'features'
_NAME = re.compile(r'shard-(\d{6})\.safetensors')


def shard_path(directory: pathlib.Path, number: int) -> pathlib.Path:
  """Returns where shard `number` lies or will lie."""
  return directory / f'shard-{number:06}.safetensors'


def find_shards(directory: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Returns numbers and paths of all shards, in their order."""
  if not directory.is_dir():
    return []
  found = [(_NAME.fullmatch(p.name), p) for p in directory.iterdir()]
  return sorted((int(match[1]), path) for match, path in found if match)


def write_shard(
  path: pathlib.Path, groups: Sequence[Group], metadata: dict[str, object]
) -> None:
  """Writes a shard; it appears complete or not at all.

  Args:
    path: path of the file.
    groups: may be empty.
    metadata: JSON values; the name and vocabulary of the target.

  Raises:
    UserError: it cannot be written.
  """
  parts = [p for group in groups for p in (group, *group.samples)]
  all_samples = [sample for group in groups for sample in group.samples]
  num_stored = parts[0].top_token_ids.shape[1] if parts else 0

  def joined(values, dtype, *shape):
    values = list(values)
    if not values:
      return np.zeros((0, *shape), dtype)
    return np.concatenate(values).astype(dtype)

  id_dtype = np.uint16 if metadata['vocab_size'] <= 2**16 else np.int32
  arrays = {
    'token_ids': joined((p.token_ids for p in parts), id_dtype),
    'roles': joined(
      (
        p.roles if isinstance(p, Sample) else np.zeros(len(p.token_ids))
        for p in parts
      ),
      np.uint8,
    ),
    # Names of format 1, which folders on disk have.
    'law_ids': joined((p.top_token_ids for p in parts), id_dtype, num_stored),
    'law_log_probs': joined(
      (p.top_log_probs for p in parts), np.float16, num_stored
    ),
    'part_sizes': np.array([len(p.token_ids) for p in parts], np.int32),
    'group_num_samples': np.array([len(g.samples) for g in groups], np.int32),
    'group_has_document': np.array([g.has_document for g in groups], np.uint8),
    'sample_kinds': np.array(
      [samples_lib.KINDS.index(s.kind) for s in all_samples], np.uint8
    ),
    'sample_temperatures': np.array(
      [s.temperature for s in all_samples], np.float16
    ),
  }
  if parts and parts[0].features is not None:
    arrays[_FEATURES] = np.concatenate([p.features for p in parts])
  metadata = {**metadata, 'format': FORMAT, 'kinds': samples_lib.KINDS}
  try:
    safetensors_file.write(
      path, arrays, {k: json.dumps(v) for k, v in metadata.items()}
    )
  except (OSError, safetensors.SafetensorError) as error:
    raise errors.UserError(
      f'cannot write {path}: {error}; name a directory that you can write to '
      'and that has room. All shards before it are kept'
    ) from error


def read_shard(path: pathlib.Path) -> tuple[list[Group], dict[str, object]]:
  """Returns the groups of a shard, and its metadata.

  Features stay in the file until they are looked at.

  Raises:
    UserError: it is cut short or no shard.
  """
  arrays = safetensors_file.tensors_of(path)
  with safetensors.safe_open(path, framework='numpy') as file:
    metadata = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
  if metadata.get('format') != FORMAT:
    raise errors.UserError(
      f'{path} is no shard of samples: its format is '
      f'{metadata.get("format")!r}; delete it and generate it again'
    )
  arrays = {
    name: array() if name == _FEATURES else np.array(array())
    for name, array in arrays.items()
  }
  return list(_groups(arrays, metadata['kinds'])), metadata


def feature_layers(directory: pathlib.Path) -> tuple[int, ...]:
  """Returns the target's layers whose outputs the first shard holds.

  Raises:
    UserError: there is no shard, or it has no features.
  """
  found = find_shards(directory)
  if not found:
    raise errors.UserError(
      f'{directory} has no shards; write them with swiftspec generate_data'
    )
  _, path = found[0]
  _, metadata = read_shard(path)
  layers = tuple(metadata.get('feature_layers', ()))
  if not layers:
    raise errors.UserError(
      f'{path} has no features, which the draft is to read; generate the data '
      'again with swiftspec generate_data --feature_layers=... in a new '
      'directory'
    )
  return layers


def check_features(
  path: pathlib.Path, metadata: dict[str, object], layers: Sequence[int]
) -> None:
  """Raises UserError if a shard does not hold the features of `layers`."""
  stored = metadata.get('feature_layers', [])
  if layers and list(stored) != list(layers):
    raise errors.UserError(
      f'{path} holds features of layers {list(stored)}, the draft reads '
      f'{list(layers)}; generate all shards with '
      f'--feature_layers={",".join(map(str, layers))}'
    )


def check_vocabulary(
  path: pathlib.Path, metadata: dict[str, object], target: Model
) -> None:
  """Raises UserError if a shard was written with another vocabulary."""
  if metadata['vocab_size'] != target.config.vocab_size:
    raise errors.UserError(
      f'{path} was written by {metadata["target"]} with another vocabulary '
      f'({metadata["vocab_size"]} tokens) than that of {target.name} '
      f'({target.config.vocab_size}); name another target or directory'
    )


def _groups(arrays, kinds) -> Iterator[Group]:
  bounds = itertools.pairwise([0, *np.cumsum(arrays['part_sizes']).tolist()])
  sample = 0

  def part():
    begin, end = next(bounds)
    fields = {
      'token_ids': arrays['token_ids'][begin:end].astype(np.int32),
      'top_token_ids': arrays['law_ids'][begin:end],
      'top_log_probs': arrays['law_log_probs'][begin:end],
    }
    if _FEATURES in arrays:
      fields[_FEATURES] = arrays[_FEATURES][begin:end]
    return fields, arrays['roles'][begin:end]

  for num_samples, has_document in zip(
    arrays['group_num_samples'].tolist(),
    arrays['group_has_document'].tolist(),
    strict=True,
  ):
    prefix, _ = part()
    found = []
    for _ in range(num_samples):
      fields, roles = part()
      found.append(
        Sample(
          kind=kinds[arrays['sample_kinds'][sample]],
          temperature=float(arrays['sample_temperatures'][sample]),
          roles=roles,
          **fields,
        )
      )
      sample += 1
    yield Group(has_document=bool(has_document), samples=tuple(found), **prefix)
