"""Files of results: written in one step, or line by line."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.runtime import atomic_file


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
  """Turns what the system says about a write to `path` into a UserError."""
  try:
    yield
  except OSError as error:
    raise errors.UserError(
      f'cannot write {path}: {error.strerror}; name a directory that you can '
      'write to and that has room'
    ) from error


def open_directory(
  directory: pathlib.Path, hint: str = '', *, resume: bool = False
) -> list[str]:
  """Makes sure that files can be added to `directory`.

  Args:
    directory: folder to write; made if it does not exist.
    hint: further remedy for a folder that is not empty.
    resume: whether there may be files already.

  Returns:
    The names of the files that are there.

  Raises:
    UserError: the directory cannot be written, or holds files although `resume`
      is false.
  """
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
      file.write(b'test')
    names = sorted(path.name for path in directory.iterdir())
  if names and not resume:
    raise errors.UserError(
      f'{directory} is not empty (it holds {names[0]}); '
      f'{f"name a new directory {hint}".rstrip()}'
    )
  return names


def append_line(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Adds a line of JSON to a file, which is made if it does not exist."""
  with writing(path), path.open('a') as file:
    file.write(f'{json.dumps(values)}\n')


def write_lines(path: pathlib.Path, lines: Iterable[Mapping[str, Any]]) -> None:
  """Makes or replaces a file of JSON lines in one step."""
  write(path, ''.join(f'{json.dumps(line)}\n' for line in lines).encode())


def write(path: pathlib.Path, content: bytes) -> None:
  """Makes or replaces a file in one step."""
  with writing(path), atomic_file.replacing(path) as partial:
    partial.write_bytes(content)


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Makes or replaces a file of JSON in one step."""
  write(path, f'{json.dumps(values, indent=2)}\n'.encode())


def write_pictures(
  directory: pathlib.Path, pictures: Mapping[str, bytes | None]
) -> None:
  """Makes or replaces NAME.png for each picture that there is."""
  for name, picture in pictures.items():
    if picture is not None:
      write(directory / f'{name}.png', picture)


def read_lines(path: pathlib.Path) -> list[Any]:
  """Reads lines of JSON; what a killed process left of one is cut off.

  Raises:
    UserError: a line is not JSON.
  """
  if not path.exists():
    return []
  content = path.read_bytes()
  num_complete = content.rfind(b'\n') + 1
  if num_complete < len(content):
    with writing(path):
      os.truncate(path, num_complete)
  values = []
  for number, line in enumerate(content[:num_complete].splitlines(), start=1):
    bad = f'{path}, line {number}: not a result: '
    with errors.explained(bad, ValueError):
      values.append(json.loads(line))
  return values
