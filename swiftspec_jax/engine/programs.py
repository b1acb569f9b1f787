"""The programs of an engine: how many there are, and which are compiled."""

from collections.abc import Callable, Sequence
from typing import Protocol

import tqdm


class Programs(Protocol):
  """Compiles the programs of an engine."""

  @property
  def num_programs(self) -> int:
    """How many there are."""

  @property
  def num_compiled(self) -> int:
    """How many are compiled."""

  @property
  def is_warming_up(self) -> bool:
    """Whether programs stand in for others that are not compiled yet."""

  @property
  def error(self) -> BaseException | None:
    """What a compilation in the background has raised; None if nothing."""

  def compile_all(self, *, show_progress: bool = False) -> None:
    """Compiles everything, and waits."""

  def start(self) -> None:
    """Compiles what the first requests need, and waits for that."""

  def stop(self) -> None:
    """Has what goes on in the background end; does not wait."""

  def join(self, timeout: float | None = None) -> bool:
    """Waits for what goes on; returns whether it has ended.

    Args:
      timeout: seconds to wait; None for any time.
    """


class FewPrograms:
  """Programs that are few enough to compile them all before any request."""

  is_warming_up = False
  error = None

  def __init__(self, plan: Callable[[], Sequence[Callable[[], None]]]):
    """Compiles nothing yet.

    Args:
      plan: function that returns functions, each of which runs a program.
    """
    self._plan = plan
    self.num_programs = self.num_compiled = 0

  def compile_all(self, *, show_progress: bool = False) -> None:
    """Compiles everything, and waits.

    Args:
      show_progress: whether a bar on standard error shows it.
    """
    steps = self._plan()
    self.num_programs, self.num_compiled = len(steps), 0
    for run in tqdm.tqdm(
      steps, 'compiling', unit='program', disable=not show_progress
    ):
      run()
      self.num_compiled += 1

  def start(self) -> None:
    """Does the same and shows it."""
    self.compile_all(show_progress=True)

  def stop(self) -> None:
    """Does nothing: nothing goes on."""

  def join(self, timeout: float | None = None) -> bool:
    """Returns True: nothing goes on."""
    del timeout
    return True
