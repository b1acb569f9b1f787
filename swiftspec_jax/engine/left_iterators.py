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


# What `weakref` calls at exit takes constants from traces that threads are
# making. Python calls first what is registered last, and the first finalizer
# registers all of them.
weakref.finalize(_left, bool)


@atexit.register  # after JAX's own, too
def _close() -> None:
  for iterator in list(_left):
    with contextlib.suppress(ValueError):  # a thread is in it
      iterator.close()
