"""Conversations as text, as the chat template of a model writes them."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from absl import logging

from swiftspec_jax import errors

if TYPE_CHECKING:
  import transformers  # takes long, and is imported with the first tokenizer

Tokenizer: TypeAlias = 'transformers.PreTrainedTokenizerFast'

Message = Mapping[str, Any]

_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_PARTS = ('content', 'tool_calls')  # of a message, that must reach the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What a template gets besides messages.

  Attributes:
    tools: tools that the model may call, as JSON schemas of functions.
    variables: further variables of the template, by name.
    opens_turn: whether the text ends with the start of the model's turn.
    continues: whether it ends within the last message instead.
  """

  tools: Sequence[Mapping[str, Any]] = ()
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  opens_turn: bool = True
  continues: bool = False


_PLAIN = Options()


def render(
  tokenizer: Tokenizer, messages: Sequence[Message], options: Options = _PLAIN
) -> str:
  """Returns the text of a conversation up to the model's turn.

  A `developer` is the `system` of templates that do not name the role. Calls of
  tools that the template does not show become JSON in the content.

  Args:
    tokenizer: tokenizer with a chat template.
    messages: messages, each with the strings 'role' and 'content'.
    options: further input of the template.

  Raises:
    UserError: the template fails, or leaves a message or the tools out.
  """
  template = tokenizer.get_chat_template(tools=options.tools or None)
  for name in options.variables:
    if name not in template:
      _note_unread(name)
  known = [role for role in _ROLES if _quotes(template, role)]
  if 'developer' not in known:
    messages = [
      {**x, 'role': 'system'} if x['role'] == 'developer' else x
      for x in messages
    ]
  text = apply(tokenizer, messages, options)
  without_tools = dataclasses.replace(options, tools=())
  if options.tools and text == apply(tokenizer, messages, without_tools):
    raise errors.UserError(
      "the model's chat template shows no tools; leave out tools, or set "
      'tool_choice to "none"'
    )
  lost = _lost(tokenizer, messages, options)
  if any(part == 'tool_calls' for _, part in lost):
    messages = [
      _with_calls_as_text(message) if (i, 'tool_calls') in lost else message
      for i, message in enumerate(messages)
    ]
    text = apply(tokenizer, messages, options)
    lost = _lost(tokenizer, messages, options)
  for i, _ in lost:
    raise errors.UserError(
      f"the model's chat template leaves out messages[{i}], of role "
      f'{messages[i]["role"]!r}; it names the roles {", ".join(known)}: use '
      'these, with system messages joined into one at the start'
    )
  return text


def apply(
  tokenizer: Tokenizer, messages: Sequence[Message], options: Options = _PLAIN
) -> str:
  """Returns what the template makes of messages.

  Raises:
    UserError: the template refuses them, or fails; a variable has the name of a
      parameter of `apply_chat_template`.
  """
  for name in options.variables:
    if name in inspect.signature(tokenizer.apply_chat_template).parameters:
      raise errors.UserError(f'chat_template_kwargs cannot have {name!r}')
  try:
    return tokenizer.apply_chat_template(
      list(map(dict, messages)),
      tools=list(options.tools) or None,
      tokenize=False,
      add_generation_prompt=options.opens_turn and not options.continues,
      continue_final_message=options.continues,
      **options.variables,
    )
  except Exception as error:  # a template is a program
    raise errors.UserError(
      f"the model's chat template refuses these messages: {error or error!r}"
    ) from error


@functools.cache
def _note_unread(name: str) -> None:
  """Logs once that a variable has no effect."""
  logging.warning("The model's chat template does not read %s.", name)


def _quotes(template: str, role: str) -> bool:
  return f"'{role}'" in template or f'"{role}"' in template


def _with_calls_as_text(message: Message) -> Message:
  calls = [call['function'] for call in message['tool_calls']]
  text = json.dumps({'tool_calls': calls}, ensure_ascii=False)
  content = message['content']
  content = f'{content}\n{text}' if content else text
  others = {k: v for k, v in message.items() if k != 'tool_calls'}
  return {**others, 'content': content}


def _lost(
  tokenizer: Tokenizer, messages: Sequence[Message], options: Options
) -> list[tuple[int, str]]:
  """Returns the index and the name of each part that a template leaves out."""
  marked = [_marked(i, message) for i, message in enumerate(messages)]
  try:
    text = apply(tokenizer, marked, options)
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
  marked = {**message}
  if message['content'].strip():
    marked['content'] = _mark(index, 'content')
  if message.get('tool_calls'):
    name = {'name': _mark(index, 'tool_calls')}
    marked['tool_calls'] = [
      {**call, 'function': {**call['function'], **name}}
      for call in message['tool_calls']
    ]
  return marked
