"""The one error type for mistakes a user can fix."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any


class UserError(ValueError):
  """Bad input; the message names the offending value and the fix.

  Command-line programs print the message alone and exit with status 1.
  """


@contextlib.contextmanager
def explained(
  before: str,
  kinds: type[Exception] | tuple[type[Exception], ...],
  after: str = '',
) -> Iterator[None]:
  """Turns errors of some kinds into UserErrors, with text around theirs."""
  try:
    yield
  except kinds as error:
    raise UserError(f'{before}{error}{after}') from error


def check_known(what: str, value: Any, known: Collection[str]) -> None:
  """Raises UserError, which says what it is, for a value that is not known."""
  if value not in known:
    raise UserError(f'{what} {value!r}; supported: {", ".join(known)}')


def check_fields(values: Any, checks: Mapping[str, tuple[bool, str]]) -> None:
  """Raises UserError for the first field that is not valid.

  Args:
    values: object that has the fields.
    checks: pairs by field: whether it is valid, and what it has to be.
  """
  for field, (is_valid, requirement) in checks.items():
    if not is_valid:
      raise UserError(
        f'{field} must be {requirement}, got {getattr(values, field)!r}'
      )
