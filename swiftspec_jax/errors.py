"""The one error type for mistakes a user can fix."""


class UserError(ValueError):
  """Bad input; the message names the offending value and the fix.

  Command-line programs print the message alone and exit with status 1.
  """
