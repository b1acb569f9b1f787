"""Files that users give, with errors that name the place."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from swiftspec_jax import errors


def read_text(path: pathlib.Path, what: str = '') -> str:
  """Returns the text of a file; raises UserError if it cannot be read.

  Args:
    path: path of the file.
    what: content of the file, for the message.
  """
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or error
    source = f'{what} from {path}' if what else path
    raise errors.UserError(f'cannot read {source}: {reason}') from error


def read_json(path: pathlib.Path, what: str = '') -> dict[str, Any]:
  """Returns the JSON object in a file.

  Args:
    path: path of the file.
    what: content of the file, for messages.

  Raises:
    UserError: the file cannot be read, or holds something else.
  """
  return _object(read_text(path, what), str(path))


def read_lines(
  path: pathlib.Path, what: str
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the place and the JSON object of each line that is not empty."""
  lines = read_text(path, what).splitlines()
  for number, line in enumerate(lines, start=1):
    if line.strip():
      place = f'{path}, line {number}'
      yield place, _object(line, place)


def _object(text: str, place: str) -> dict[str, Any]:
  with errors.explained(f'{place}: not valid JSON: ', ValueError):
    values = json.loads(text)
  if not isinstance(values, dict):
    raise errors.UserError(f'{place}: must be a JSON object, got {text[:60]}')
  return values
