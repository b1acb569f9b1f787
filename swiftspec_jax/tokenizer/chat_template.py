"""Conversations as text, as the chat template of a model writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from swiftspec_jax import errors

if TYPE_CHECKING:
  import transformers  # takes long, and is imported with the first tokenizer

Tokenizer: TypeAlias = 'transformers.PreTrainedTokenizerFast'

Message = Mapping[str, Any]

_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_PARTS = ('content', 'tool_calls')  # of a message, that must reach the model


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
  """Returns the text of a conversation up to the model's turn.

  A `developer` is the `system` of templates that do not name the role. Calls of
  tools that the template does not show become JSON in the content.

  Args:
    tokenizer: tokenizer with a chat template.
    messages: messages, each with the string 'role', and 'content' that is a
      string or, for models that read images, a list of parts.

  Raises:
    UserError: the template fails, or leaves a message out.
  """
  template = tokenizer.get_chat_template()
  known = [role for role in _ROLES if _quotes(template, role)]
  if 'developer' not in known:
    messages = [_as_system(message) for message in messages]
  text = apply(tokenizer, messages)
  lost = _lost(tokenizer, messages)
  if any(part == 'tool_calls' for _, part in lost):
    messages = [
      _with_calls_as_text(message) if (i, 'tool_calls') in lost else message
      for i, message in enumerate(messages)
    ]
    text = apply(tokenizer, messages)
    lost = _lost(tokenizer, messages)
  for i, _ in lost:
    raise errors.UserError(
      f"the model's chat template leaves out messages[{i}], of role "
      f'{messages[i]["role"]!r}; it names the roles {", ".join(known)}: use '
      'these, with system messages joined into one at the start'
    )
  return text


def apply(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
  """Returns what the template makes of messages.

  Raises:
    UserError: the template refuses them, or fails.
  """
  try:
    return tokenizer.apply_chat_template(
      list(map(dict, messages)), tokenize=False, add_generation_prompt=True
    )
  except Exception as error:  # a template is a program
    raise errors.UserError(
      f"the model's chat template refuses these messages: {error or error!r}"
    ) from error


def _quotes(template: str, role: str) -> bool:
  return f"'{role}'" in template or f'"{role}"' in template


def _as_system(message: Message) -> Message:
  is_developer = message['role'] == 'developer'
  return {**message, 'role': 'system'} if is_developer else message


def _with_calls_as_text(message: Message) -> Message:
  calls = [call['function'] for call in message['tool_calls']]
  text = json.dumps({'tool_calls': calls}, ensure_ascii=False)
  content = message['content']
  if isinstance(content, str):
    content = f'{content}\n{text}' if content else text
  else:
    content = [*content, {'type': 'text', 'text': text}]
  others = {k: v for k, v in message.items() if k != 'tool_calls'}
  return {**others, 'content': content}


def _lost(
  tokenizer: Tokenizer, messages: Sequence[Message]
) -> list[tuple[int, str]]:
  """Returns the index and the name of each part that a template leaves out."""
  marked = [_marked(i, message) for i, message in enumerate(messages)]
  try:
    text = apply(tokenizer, marked)
  except errors.UserError:
    return []  # it reads what the parts say
  return [
    (i, part)
    for i, message in enumerate(marked)
    for part in _PARTS
    if _mark(i, part) in str(message.get(part))
    and _mark(i, part) not in text
    # Templates may replace the text around calls.
    and not (part == 'content' and message.get('tool_calls'))
  ]


def _mark(index: int, part: str) -> str:
  return f'mark-{part}-{index}-'


def _marked(index: int, message: Message) -> Message:
  """Returns a message that has marks in place of texts and names of tools."""
  mark = _mark(index, 'content')
  content = message['content']
  if not isinstance(content, str):
    content = [
      {**part, 'text': mark} if part.get('text', '').strip() else part
      for part in content
    ]
  elif content.strip():
    content = mark
  marked = {**message, 'content': content}
  if message.get('tool_calls'):
    name = {'name': _mark(index, 'tool_calls')}
    marked['tool_calls'] = [
      {**call, 'function': {**call['function'], **name}}
      for call in message['tool_calls']
    ]
  return marked
