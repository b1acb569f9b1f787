"""The one error type for mistakes a user can fix."""

from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
  """Bad input; the message names the offending value and the fix.

  Command-line programs print the message alone and exit with status 1.
  """


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
