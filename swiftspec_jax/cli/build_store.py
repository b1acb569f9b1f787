"""Writes the texts that drafts of mode datastore are looked up in.

  swiftspec build_store --output_dir=store --texts='docs/*.md'
  swiftspec build_store --output_dir=store --shards=data
  swiftspec serve --mode=datastore --datastore=store

Texts are files, named by quoted glob patterns, and the samples of folders that
swiftspec generate_data has written: what the target itself wrote is found
again most often. A text ends at an end-of-sequence token of the target, and no
draft goes beyond. Whoever is served may see parts of the texts, so give texts
of one owner a store of their own.
"""

import glob
import pathlib
from collections.abc import Iterator, Sequence

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.cli.flags import shared_flags
from swiftspec_jax.distillation import shards
from swiftspec_jax.drafters.texts import token_store
from swiftspec_jax.runtime import input_files

_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the store.', required=True
)
_TEXTS = flags.DEFINE_multi_string(
  'texts', [], 'Text files, as quoted glob patterns.'
)
_SHARDS = flags.DEFINE_multi_string(
  'shards', [], 'Directories of swiftspec generate_data.'
)


def main() -> None:
  """Runs the program."""
  if not (_TEXTS.value or _SHARDS.value):
    raise errors.UserError('there is no text: give --texts or --shards')
  shared_flags.check(['autoregressive'])
  paths = _paths()
  directory = pathlib.Path(_OUTPUT_DIR.value)
  output_files.open_directory(directory)
  target = shared_flags.load_target()
  texts = [
    part
    for text in (*_of_files(paths, target), *_of_shards(target))
    for part in token_store.split(text, target.config.eos_token_ids)
  ]
  store = token_store.TokenStore.of_texts(texts, target.tokenizer)
  store.save(directory)
  print(f'{len(texts):,} texts, {len(store.tokens):,} tokens in {directory}')


def _paths() -> list[pathlib.Path]:
  found = []
  for pattern in _TEXTS.value:
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
      raise errors.UserError(f'--texts={pattern} matches no file')
    found += map(pathlib.Path, matches)
  for name in _SHARDS.value:
    if not shards.find_shards(pathlib.Path(name)):
      raise errors.UserError(
        f'--shards={name} has no shards; write them with '
        'swiftspec_jax.cli.generate_data'
      )
  return found


def _of_files(
  paths: Sequence[pathlib.Path], target: ss.Model
) -> Iterator[list[int]]:
  for path in paths:
    text = input_files.read_text(path)
    yield target.tokenizer.encode(text, add_special_tokens=False)


def _of_shards(target: ss.Model) -> Iterator[list[int]]:
  """Yields the texts before samples, and the samples."""
  for name in _SHARDS.value:
    for _, path in shards.find_shards(pathlib.Path(name)):
      groups, metadata = shards.read_shard(path)
      shards.check_vocabulary(path, metadata, target)
      for group in groups:
        for part in (group, *group.samples):
          yield part.token_ids.tolist()


if __name__ == '__main__':
  program.run(main)
