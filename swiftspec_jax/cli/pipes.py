"""Standard output whose reader may go before the end, such as `head`."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def reader_may_go() -> Iterator[None]:
  """Ends its block without a complaint when nobody reads any more."""
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    silence()


def silence() -> None:
  """Drops what is still to be written: Python's flush at exit would fail."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
