"""The file steps.jsonl: which shapes the steps of each run had."""

import collections
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.cli import output_files
from swiftspec_jax.compilation.shape_classes import Shape


def append(
  path: pathlib.Path, shapes: Mapping[Shape, int], run: Mapping[str, Any]
) -> None:
  """Adds a line for a run.

  Args:
    path: file to add to.
    shapes: number of steps by their rows and query tokens.
    run: JSON values that tell the run from others.
  """
  counts = [[*shape, count] for shape, count in sorted(shapes.items())]
  output_files.append_line(path, {**run, 'shapes': counts})


def read(path: pathlib.Path) -> collections.Counter[Shape]:
  """Returns the number of steps of each shape, all runs together.

  Raises:
    UserError: the file cannot be read, or is no such file.
  """
  shapes: collections.Counter[Shape] = collections.Counter()
  try:
    for line in path.read_text().splitlines():
      for rows, tokens, count in json.loads(line)['shapes']:
        shapes[int(rows), int(tokens)] += int(count)
  except OSError as error:
    raise errors.UserError(f'{path} cannot be read: {error}') from error
  except (ValueError, TypeError, KeyError) as error:
    raise errors.UserError(
      f'{path} is no steps.jsonl of serve_load or simulate_load: {error!r}'
    ) from error
  return shapes
