"""Messages of conversations, as clients send them."""

import contextlib
import json
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from swiftspec_jax.server.json_object import JsonObject, Neutral


class TextPart(JsonObject):
  """A part of a message."""

  type: Literal['text']
  text: str


class Function(JsonObject):
  """What a call of a tool says."""

  name: str
  arguments: str = '{}'


class ToolCall(JsonObject):
  """A call of a tool, in what an assistant has said."""

  id: str | None = None
  index: int | None = None  # of parts of an answer, that clients keep
  type: Literal['function'] = 'function'
  function: Function

  def to_template(self) -> dict[str, Any]:
    """Returns the call as chat templates want it: its arguments are parsed."""
    arguments: Any = self.function.arguments
    with contextlib.suppress(ValueError):
      arguments = json.loads(arguments)
    function = {'name': self.function.name, 'arguments': arguments}
    return {'id': self.id, 'type': self.type, 'function': function}


class OfferedFunction(JsonObject):
  """A function that the model may call."""

  name: str = Field(pattern=r'^[\w.-]+$', max_length=64)
  description: str = ''
  parameters: dict[str, Any] = Field({}, description='A JSON schema.')
  strict: bool = False


class Tool(JsonObject):
  """A tool that the model may use."""

  type: Literal['function']
  function: OfferedFunction

  def to_template(self) -> dict[str, Any]:
    """Returns the tool as chat templates want it."""
    function = self.function.model_dump(exclude_unset=True, exclude={'strict'})
    return {'type': self.type, 'function': function}


class NamedFunction(JsonObject):
  """The name of a function."""

  name: str


class NamedTool(JsonObject):
  """The tool that the model has to use."""

  type: Literal['function']
  function: NamedFunction


class Message(JsonObject):
  """A message of a conversation."""

  _neutral: ClassVar[Neutral] = {'annotations': ([],), 'tool_calls': ([],)}

  role: str = Field(
    min_length=1,
    description='Any that the chat template of the model shows; developer is '
    'system where it does not name that.',
  )
  content: str | list[TextPart] = Field(
    '', description='Only messages of assistants may go without.'
  )
  name: str | None = None
  tool_calls: list[ToolCall] | None = None
  tool_call_id: str | None = None

  @pydantic.model_validator(mode='after')
  def _check_content(self):
    if 'content' not in self.model_fields_set and self.role != 'assistant':
      raise ValueError(f'a message of role {self.role!r} needs content')
    return self

  def to_template(self) -> dict[str, Any]:
    """Returns the message as chat templates want it."""
    found: dict[str, Any] = {'role': self.role, 'content': self._text()}
    if self.tool_calls is not None:
      found['tool_calls'] = [call.to_template() for call in self.tool_calls]
    for name in ('name', 'tool_call_id'):
      if getattr(self, name) is not None:
        found[name] = getattr(self, name)
    return found

  def _text(self) -> str:
    if isinstance(self.content, str):
      return self.content
    return '\n'.join(part.text for part in self.content)
