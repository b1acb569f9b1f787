"""Files that appear complete or not at all."""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a new path beside `path`; what is written there takes its place.

  If the `with` block raises, `path` stays as it was.
  """
  partial = path.with_name(f'.{path.name}-{uuid.uuid4().hex}')
  try:
    yield partial
    with partial.open('rb') as file:
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)
