"""Where a model is: built in, a file, a directory, or on the hub."""

import fnmatch
import functools
import pathlib
import re
from collections.abc import Sequence

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import builtin

_PIECE = re.compile(r'-\d{5}-of-\d{5}(?=\.gguf$)')


def find(name: str) -> pathlib.Path:
  """Returns the file or directory of a model; fetches it if need be.

  Raises:
    UserError: nothing by that name.
  """
  if name in builtin.BUILTIN_MODELS:
    return builtin.fetch(name)
  if name in builtin.BUILTIN_DRAFTS:
    return builtin.draft_directory(name)
  path = pathlib.Path(name).expanduser()
  if path.exists():
    return path
  name, _, file = name.partition(':')
  if not file:
    return path if path.suffix == '.gguf' else _download(name)
  directory = pathlib.Path(name).expanduser()
  if not directory.is_dir():
    directory = _download(name, [file, file.replace('.gguf', '-*-of-*.gguf')])
  return _choose(directory, file)


def _choose(directory: pathlib.Path, file: str) -> pathlib.Path:
  """Returns the one .gguf file that a glob names; the first piece of several.

  Raises:
    UserError: it names none, or several.
  """
  paths = dict[str, pathlib.Path]()
  for path in sorted(directory.rglob('*.gguf'), key=lambda path: path.name):
    paths.setdefault(_PIECE.sub('', path.name), path)
  found = [name for name in paths if fnmatch.fnmatchcase(name, file)]
  if len(found) != 1:
    names = ', '.join(found or paths) or 'none'
    raise errors.UserError(
      f'file={file!r} must name one .gguf file of {directory}; '
      f'{"it names" if found else "there are"} {names}'
    )
  return paths[found[0]]


def _download(repo_id: str, files: Sequence[str] | None = None) -> pathlib.Path:
  """Fetches a hub repository, or finds it in the local hub cache.

  Args:
    repo_id: id on the hub.
    files: globs of the files; None for a model in Hugging Face layout.
  """
  import huggingface_hub.errors  # here, as these take long
  import huggingface_hub.utils

  try:
    huggingface_hub.utils.validate_repo_id(repo_id)
    if files is not None:
      return pathlib.Path(
        huggingface_hub.snapshot_download(repo_id, allow_patterns=[*files])
      )
    fetch = functools.partial(
      huggingface_hub.snapshot_download,
      repo_id,
      # The same weights in other layouts.
      ignore_patterns=['*/*', 'consolidated*'],
    )
    directory = pathlib.Path(
      fetch(allow_patterns=['*.json', '*.safetensors', '*.model', '*.jinja'])
    )
    if not list(directory.glob('*.safetensors')):
      fetch(allow_patterns=['pytorch_model.bin'])
  except (
    huggingface_hub.errors.HfHubHTTPError,
    huggingface_hub.errors.HFValidationError,
    huggingface_hub.errors.LocalEntryNotFoundError,
    OSError,
  ) as error:
    builtins = ', '.join((*builtin.BUILTIN_MODELS, *builtin.BUILTIN_DRAFTS))
    reason = ' '.join(str(error).split())
    if isinstance(error, huggingface_hub.errors.HFValidationError):
      reason = 'its ids have the form owner/name'
    raise errors.UserError(
      f'no model {repo_id!r}: not a built-in name ({builtins}), not a file or '
      f'directory, and not to be had from the Hugging Face hub: {reason}'
    ) from error
  return directory
