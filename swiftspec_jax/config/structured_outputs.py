"""Which texts an output may be."""

import dataclasses
import json as json_lib
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec_jax import errors

# Compilation takes time and memory in proportion to the text.
MAX_CHARACTERS = 2**17


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
  """A grammar that a whole output follows; names as in vLLM. One is given.

  Attributes:
    json: JSON Schema of the output, as an object or as its text, which is what
      it becomes. The output has one space after commas and colons, and no other
      white space, unless `x-guidance` in the schema says something else.
    json_object: whether the output is any JSON object.
    regex: regular expression that matches the whole output.
    choice: texts, one of which the output is.
    grammar: context-free grammar, in the Lark syntax of llguidance.
  """

  json: Mapping[str, Any] | str | None = None
  json_object: bool = False
  regex: str | None = None
  choice: Sequence[str] = ()
  grammar: str | None = None

  def __post_init__(self):
    if not isinstance(self.json, str | None):
      object.__setattr__(self, 'json', json_lib.dumps(self.json))
    object.__setattr__(self, 'choice', tuple(self.choice))
    given = [name for name, value in vars(self).items() if value]
    if len(given) != 1:
      raise errors.UserError(
        'structured_outputs needs exactly one of json, json_object, regex, '
        f'choice and grammar, got {" and ".join(given) or "none"}'
      )
    if '' in self.choice:
      raise errors.UserError(
        'structured_outputs.choice has an empty text; an output has a token'
      )
    size = sum(map(len, self.choice)) or len(str(getattr(self, given[0])))
    if size > MAX_CHARACTERS:
      raise errors.UserError(
        f'structured_outputs.{given[0]} has {size} characters; the most is '
        f'{MAX_CHARACTERS}'
      )

  @property
  def kind(self) -> str:
    """Name of the field that is given."""
    return next(name for name, value in vars(self).items() if value)
