"""What clients can ask /v1/responses for: a conversation in other words."""

from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from swiftspec_jax.server import messages
from swiftspec_jax.server.json_object import JsonObject, Neutral
from swiftspec_jax.server.schema import ChatRequest, StreamOptions

# What an answer tells again of its request.
_TOLD_AGAIN = {
  'instructions',
  'max_output_tokens',
  'parallel_tool_calls',
  'temperature',
  'text',
  'tool_choice',
  'tools',
  'top_p',
}


class _Item(JsonObject):
  """A part of the input, as answers have it too."""

  id: str | None = None
  status: str | None = None


class _Text(JsonObject):
  _neutral: ClassVar[Neutral] = {'annotations': ([],), 'logprobs': ([],)}

  type: Literal['input_text', 'output_text']
  text: str


def _parts(content: str | list[_Text]) -> str | list[dict[str, Any]]:
  """Returns a content as chats have it."""
  if isinstance(content, str):
    return content
  return [{'type': 'text', 'text': part.text} for part in content]


class _Message(_Item):
  type: Literal['message'] = 'message'
  role: str
  content: str | list[_Text]

  def to_chat(self) -> dict[str, Any]:
    return {'role': self.role, 'content': _parts(self.content)}


class _Call(_Item):
  type: Literal['function_call']
  call_id: str
  name: str
  arguments: str

  def to_chat(self) -> dict[str, Any]:
    function = {'name': self.name, 'arguments': self.arguments}
    call = {'id': self.call_id, 'type': 'function', 'function': function}
    return {'role': 'assistant', 'tool_calls': [call]}


class _CallOutput(_Item):
  type: Literal['function_call_output']
  call_id: str
  output: str | list[_Text]

  def to_chat(self) -> dict[str, Any]:
    content = _parts(self.output)
    return {'role': 'tool', 'tool_call_id': self.call_id, 'content': content}


class _Tool(messages.OfferedFunction):
  type: Literal['function']

  def to_chat(self) -> dict[str, Any]:
    function = self.model_dump(exclude_unset=True, exclude={'type'})
    return {'type': 'function', 'function': function}


class _NamedTool(messages.NamedFunction):
  type: Literal['function']


class _Format(JsonObject):
  type: Literal['text', 'json_object', 'json_schema']
  name: str | None = None
  description: str | None = None
  schema_: dict[str, Any] | None = Field(None, alias='schema')
  strict: bool | None = None

  def to_chat(self) -> dict[str, Any]:
    if self.type != 'json_schema':
      return {'type': self.type}
    schema = self.model_dump(by_alias=True, exclude={'type'})
    return {'type': self.type, 'json_schema': schema}


class _TextOptions(JsonObject):
  format: _Format = _Format(type='text')


class _Reasoning(JsonObject):
  effort: str | None = None


class ResponsesRequest(JsonObject):
  """The body of /v1/responses; nothing is stored."""

  _neutral: ClassVar[Neutral] = {
    'background': (False,),
    'include': ([], ['reasoning.encrypted_content']),
    'top_logprobs': (0,),
    'truncation': ('disabled',),
  }

  model: str | None = None
  input: str | list[_Message | _Call | _CallOutput]
  instructions: str | None = None
  max_output_tokens: int | None = Field(None, ge=1)
  parallel_tool_calls: bool = True
  reasoning: _Reasoning = _Reasoning()
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  temperature: float = 1.0
  text: _TextOptions = _TextOptions()
  tool_choice: Literal['none', 'auto', 'required'] | _NamedTool = 'auto'
  tools: list[_Tool] = Field([])
  top_p: float = 1.0

  @pydantic.field_validator('input', mode='before')
  @classmethod
  def _drop_thoughts(cls, value: Any) -> Any:
    if not isinstance(value, list):
      return value
    return [
      item
      for item in value
      if not (isinstance(item, dict) and item.get('type') == 'reasoning')
    ]

  @pydantic.model_validator(mode='after')
  def _check_chat(self):
    try:
      self.to_chat()
    except pydantic.ValidationError as error:
      first = error.errors()[0]
      place = '.'.join(map(str, first['loc']))
      raise ValueError(f'as a chat, {place}: {first["msg"]}') from error
    return self

  def to_chat(self) -> ChatRequest:
    """Returns the same as a body of /v1/chat/completions.

    Raises:
      ValidationError: a value is none that chats have.
    """
    choice = self.tool_choice
    if isinstance(choice, _NamedTool):
      choice = {'type': 'function', 'function': {'name': choice.name}}
    return ChatRequest.model_validate(
      {
        'model': self.model,
        'messages': self._messages(),
        'max_completion_tokens': self.max_output_tokens,
        'parallel_tool_calls': self.parallel_tool_calls,
        'reasoning_effort': self.reasoning.effort,
        'response_format': self.text.format.to_chat(),
        'stream': self.stream,
        'temperature': self.temperature,
        'tool_choice': choice,
        'tools': [tool.to_chat() for tool in self.tools],
        'top_p': self.top_p,
      }
    )

  def told_again(self) -> dict[str, Any]:
    """Returns what an answer has of this."""
    return self.model_dump(mode='json', by_alias=True, include=_TOLD_AGAIN)

  def _messages(self) -> list[dict[str, Any]]:
    found = []
    if self.instructions is not None:
      found.append({'role': 'system', 'content': self.instructions})
    if isinstance(self.input, str):
      return [*found, {'role': 'user', 'content': self.input}]
    for item in self.input:
      message = item.to_chat()
      calls = message.get('tool_calls')
      if calls and found and found[-1]['role'] == 'assistant':
        # What an answer says and all its calls are one message of a chat.
        found[-1].setdefault('tool_calls', []).extend(calls)
      else:
        found.append(message)
    return found
