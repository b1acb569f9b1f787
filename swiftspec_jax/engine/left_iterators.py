"""Iterators that a program does not read to their ends."""

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec('P')
T = TypeVar('T')
_left: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def closed_at_exit(
  function: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
  """Has the iterators of a function closed while JAX still works.

  Python itself would close them later, when it has taken modules apart.
  """

  @functools.wraps(function)
  def make(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
    iterator = function(*args, **kwargs)
    _left.add(iterator)
    return iterator

  return make


@atexit.register  # after JAX's own, and so called before them
def _close() -> None:
  for iterator in list(_left):
    with contextlib.suppress(ValueError):  # a thread is in it
      iterator.close()
