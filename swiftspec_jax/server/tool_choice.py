"""Grammars of calls, for requests that must call tools or follow schemas."""

import json
import re
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.config import StructuredOutputs
from swiftspec_jax.requests import grammar as grammar_lib
from swiftspec_jax.server.messages import OfferedFunction
from swiftspec_jax.server.schema import ChatRequest
from swiftspec_jax.tokenizer import Tokenizer

# By format: what stands before calls, each call, and what stands between two
# and after them.
_SHAPES = {
  'hermes': (
    '',
    '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    '\n',
    '',
  ),
  'llama3_json': ('', '{"name": "NAME", "parameters": ARGUMENTS}', '; ', ''),
  'mistral': (
    '[TOOL_CALLS] [',
    '{"name": "NAME", "arguments": ARGUMENTS}',
    ', ',
    ']',
  ),
}
_NEWER_MISTRAL = ('', '[TOOL_CALLS]NAME[ARGS]ARGUMENTS', '', '')
# What calls start with; after a text only if it is a token.
_STARTS = {
  'hermes': '<tool_call>',
  'llama3_json': '<|python_tag|>',
  'mistral': '[TOOL_CALLS]',
}
_MARK = re.compile(r'(</?tool_call>|\[TOOL_CALLS\]|\[ARGS\])')
_NO_ARGUMENTS = {'type': 'object', 'additionalProperties': False}


def sampling_of(
  format_name: str | None, tokenizer: Tokenizer, body: ChatRequest
) -> dict[str, Any]:
  """Returns the fields of the sampling that tools change.

  Raises:
    UserError: calls are to follow a grammar, and their format is not known.
  """
  if not body.offered_tools:
    return {}
  fields: dict[str, Any] = {}
  if format_name != 'hermes':  # others have special tokens
    fields['skip_special_tokens'] = False
  is_forced = body.tool_choice != 'auto'
  is_free = not (body.response_format or body.structured_outputs)
  is_strict = any(tool.function.strict for tool in body.offered_tools)
  if is_forced or (is_strict and is_free):
    if format_name not in _SHAPES:
      raise errors.UserError(
        'tool_choice and strict tools need a known format of calls; start the '
        f'server with --tool_call_parser={"|".join(_SHAPES)}'
      )
    grammar = _grammar(format_name, tokenizer, body, is_forced)
    fields['structured_outputs'] = StructuredOutputs(grammar=grammar)
  return fields


def _grammar(
  format_name: str, tokenizer: Tokenizer, body: ChatRequest, is_forced: bool
) -> str:
  """Returns the grammar of answers in the Lark syntax of llguidance.

  Args:
    format_name: key of `_SHAPES`.
    tokenizer: tokenizer whose tokens stand for marks.
    body: fields of the call.
    is_forced: whether there must be a call, and no text beside it. If not, only
      the schemas of strict tools count.
  """
  tools = body.callable_tools
  shape = _SHAPES[format_name]
  if format_name == 'mistral' and '[ARGS]' in tokenizer.get_vocab():
    shape = _NEWER_MISTRAL
  first, call, between, last = shape

  def written(text: str) -> str:
    return ' '.join(_symbol(x, tokenizer) for x in _MARK.split(text) if x)

  def any_call(text: str) -> str:
    before, after = text.split('ARGUMENTS')
    return ' | '.join(
      f'{written(before.replace("NAME", tool.function.name))} arguments_{i} '
      f'{written(after)}'
      for i, tool in enumerate(tools)
    )

  further = ''
  if body.parallel_tool_calls and body.tool_choice in ('auto', 'required'):
    further = f'({written(between)} call)*'
  start = _STARTS[format_name]
  is_token = start in tokenizer.get_added_vocab()
  answer = 'TEXT? calls?' if is_token else 'TEXT | calls'
  return '\n'.join(
    (
      f'start: {"calls" if is_forced else f"{answer} | bare"}',
      f'calls: {written(first)} call {further} {written(last)}',
      f'call: {any_call(call)}',
      # Small models leave out the marks.
      f'bare: {any_call(_MARK.sub("", call).strip())}',
      rf'TEXT: /\s*[^\s`{{](?s:.*)/ & ~/(?s:.*){re.escape(start)}(?s:.*)/',
      *(
        f'arguments_{i}: %json {_schema(tool.function, is_forced)}'
        for i, tool in enumerate(tools)
      ),
    )
  )


def _schema(function: OfferedFunction, is_forced: bool) -> str:
  """Returns the schema that arguments follow, as JSON."""
  schema = function.parameters or _NO_ARGUMENTS
  if not (is_forced or function.strict):
    schema = {'type': 'object'}
  return json.dumps({'x-guidance': grammar_lib.JSON_STYLE, **schema})


def _symbol(text: str, tokenizer: Tokenizer) -> str:
  """Returns a mark or other text as Lark has it; a token by its id."""
  token_id = tokenizer.get_added_vocab().get(text)
  return json.dumps(text) if token_id is None else f'<[{token_id}]>'
