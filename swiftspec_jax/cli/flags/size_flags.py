"""Flags that list sizes."""

from absl import flags

from swiftspec_jax import errors


def read(holder: flags.FlagHolder) -> tuple[int, ...]:
  """Returns the sizes of a list flag.

  Raises:
    UserError: they are no ascending whole numbers from 1 up.
  """
  if not all(text.isdecimal() for text in holder.value):
    raise errors.UserError(
      f'--{holder.name}={",".join(holder.value)} must be numbers such as 8,16'
    )
  numbers = tuple(map(int, holder.value))
  if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1:
    raise errors.UserError(
      f'--{holder.name}={",".join(holder.value)} must be ascending, from 1 up'
    )
  return numbers
