"""Calls of tools in texts, and grammars of them."""

import dataclasses
import json
import random

import numpy as np
import pytest

from swiftspec_jax import testing
from swiftspec_jax.requests import grammar
from swiftspec_jax.server import schema, tool_calls, tool_choice

F, G = ('f', '{"x": "}]\\"{\\\\", "y": [1, {}]}'), ('g', '{}')
JSON_F = f'{{"name": "f", "arguments": {F[1]}}}'
LLAMA_F = JSON_F.replace('arguments', 'parameters')
JSON_G, LLAMA_G = '{"name": "g"}', '{"name": "g", "parameters": {}}'
CALL_F = f'<tool_call>{JSON_F}</tool_call>'
# The format, a text, and its content and calls.
TEXTS = [
  ('hermes', f'<tool_call>\n{JSON_F}\n</tool_call>', '', [F]),
  (
    'hermes',
    f'So:\n{CALL_F}\n<tool_call>{JSON_G}</tool_call>\n',
    'So:',
    [F, G],
  ),
  ('hermes', f'{CALL_F} Done.', ' Done.', [F]),
  ('hermes', '<tool_call>\n{"name": "f", "arguments": {"x', '', [('f', '{"x')]),
  ('hermes', 'a <tool_call> b', 'a <tool_call> b', []),
  ('hermes', f'{JSON_F}\n', '', [F]),
  ('hermes', f'```json\n{JSON_F}\n```', '', [F]),
  ('hermes', f'{JSON_F}\n{JSON_G}', '', [F, G]),
  ('hermes', f'As {JSON_F}', f'As {JSON_F}', []),
  ('llama3_json', f'{LLAMA_F}; {LLAMA_G}', '', [F, G]),
  ('llama3_json', f'Hm. <|python_tag|>{LLAMA_F}', 'Hm.', [F]),
  ('llama3_json', f'Hm. {LLAMA_F}', f'Hm. {LLAMA_F}', []),
  (
    'mistral',
    f'Hm.[TOOL_CALLS] [{JSON_F}, '
    '{"name": "g", "arguments": {}, "id": "abcdefghi"}]',
    'Hm.',
    [F, G],
  ),
  (
    'mistral',
    f'[TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]g[CALL_ID]ab[ARGS]{{}}',
    '',
    [F, G],
  ),
]


def joined(parts):
  """The content and the calls of parts."""
  content, calls = '', []
  for part in parts:
    if isinstance(part, tool_calls.TextPart):
      content += part.text
    else:
      if part.name is not None:
        calls.append([part.name, ''])
      assert part.index == len(calls) - 1
      calls[-1][1] += part.arguments
  return content, list(map(tuple, calls))


@pytest.mark.parametrize(('format_name', 'text', 'content', 'calls'), TEXTS)
def test_calls_are_found_however_a_text_is_cut(
  format_name, text, content, calls
):
  rng = random.Random(0)
  cuts = [range(1, len(text)), ()]
  cuts += [sorted(rng.sample(range(1, len(text)), 3)) for _ in range(50)]
  for places in cuts:
    reader = tool_calls.CallReader(tool_calls.FORMATS[format_name])
    ends = [*places, len(text)]
    parts = []
    for start, end in zip([0, *places], ends, strict=True):
      parts += reader.push(text[start:end], is_last=end == len(text))
    assert joined(parts) == (content, calls)


def test_arguments_come_before_their_call_ends():
  reader = tool_calls.CallReader(tool_calls.FORMATS['hermes'])
  head = '<tool_call>{"name": "f", "arguments": {'
  assert joined(reader.push(head)) == ('', [('f', '{')])
  (part,) = reader.push('"x": "a')
  assert (part.name, part.arguments) == (None, '"x": "a')


RIGHT, WRONG = '{"x": 1, "y": 2}', '{"x": 1.5, "y": 2}'
INTEGER = {'type': 'integer'}
FUNCTION = {
  'name': 'add',
  'parameters': {
    'type': 'object',
    'properties': {'x': INTEGER, 'y': INTEGER},
    'additionalProperties': False,
  },
}
TOOLS = [{'type': 'function', 'function': FUNCTION}]
STRICT = {'type': 'function', 'function': {**FUNCTION, 'strict': True}}
OTHER = {'type': 'function', 'function': {'name': 'g'}}
NAMED = {'type': 'function', 'function': {'name': 'add'}}


@pytest.mark.parametrize(
  ('format_name', 'call', 'joined_by'),
  [
    (
      'hermes',
      '<tool_call>\n{"name": "add", "arguments": ARGUMENTS}\n</tool_call>',
      ('', '\n', ''),
    ),
    ('llama3_json', '{"name": "add", "parameters": ARGUMENTS}', ('', '; ', '')),
    (
      'mistral',
      '{"name": "add", "arguments": ARGUMENTS}',
      ('[TOOL_CALLS] [', ', ', ']'),
    ),
  ],
)
def test_grammars_of_calls(format_name, call, joined_by):
  tokenizer = testing.byte_tokenizer()
  tokenizer.add_tokens(['<tool_call>', '</tool_call>', '[TOOL_CALLS]'])
  model = testing.table_model(np.eye(len(tokenizer)), eos_token_ids=[257])
  model = dataclasses.replace(model, tokenizer=tokenizer)

  def is_allowed(text, **options):
    body = {'model': 'm', 'messages': [{'role': 'user', 'content': 'a'}]}
    body |= {'tools': [STRICT, OTHER], **options}
    request = schema.ChatRequest.model_validate(body)
    fields = tool_choice.sampling_of(format_name, tokenizer, request)
    matcher = grammar.start(fields['structured_outputs'], model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.consume_token, ids)) and matcher.is_accepting()

  first, between, last = joined_by
  key = 'parameters' if format_name == 'llama3_json' else 'arguments'
  right = call.replace('ARGUMENTS', RIGHT)
  once = first + right + last
  other = first + call.replace('add', 'g').replace('ARGUMENTS', '{}') + last
  for choice in ('required', NAMED):
    assert is_allowed(once, tool_choice=choice)
    assert not is_allowed(f'So: {once}', tool_choice=choice)
    assert not is_allowed('', tool_choice=choice)
    assert is_allowed(other, tool_choice=choice) == (choice == 'required')
    twice = first + right + between + right + last
    assert is_allowed(twice, tool_choice=choice) == (choice == 'required')
    options = {'tool_choice': choice, 'parallel_tool_calls': False}
    assert not is_allowed(twice, **options)
    wrong = once.replace(RIGHT, WRONG)
    assert not is_allowed(wrong, tool_choice=choice)
  # Strict tools are called right, if they are.
  assert is_allowed(once)
  assert is_allowed(other)
  assert is_allowed(f'So: {once}')
  assert not is_allowed(wrong)
  assert is_allowed(f'{{"name": "add", "{key}": {RIGHT}}}')
  assert not is_allowed(f'{{"name": "add", "{key}": {WRONG}}}')
  # In the format of Llama this is a text.
  assert is_allowed(f'So: {wrong}') == (format_name == 'llama3_json')


# The model answers what stands after "a", and what a tool says after the end.
TEMPLATE = (
  '{{ "<tool_call>\n{" if tools }}{% for m in messages %}{{ m.content }}'
  '{% endfor %}{{ "<end>" if messages[-1].role == "tool" else "a" }}'
)


def test_formats_are_those_of_templates():
  tokenizer = testing.byte_tokenizer()
  for template, expected in (
    (TEMPLATE, 'hermes'),
    ('give {"name": function name, "parameters": dictionary of', 'llama3_json'),
    ({'default': '', 'tool_use': '[TOOL_CALLS]'}, 'mistral'),
    ('<tool_call>\n<function=', None),
    (None, None),
  ):
    tokenizer.chat_template = template
    assert tool_calls.format_of(tokenizer) == expected


def test_a_tokenizer_can_declare_how_its_model_answers():
  tokenizer = testing.byte_tokenizer()
  tokenizer.response_template = {
    'start_anchor': '<|assistant|>',
    'fields': {
      'reasoning_content': {'open': '<think>', 'close': '</think>'},
      'tool_calls': {
        'open': '<call>',
        'close': '</call>',
        'repeats': True,
        'content': 'json',
        'transform': {'type': 'function', 'function': '{content}'},
      },
      'content': {},
    },
  }
  assert tool_calls.format_of(tokenizer) == tool_calls.DECLARED
  prompt = tokenizer.encode('<|user|>Hi<|assistant|>')
  make = tool_calls.make_reader(tool_calls.DECLARED, tokenizer, prompt, ())
  parts = make().push(
    f'<think>Hm</think>So:<call>{JSON_F}</call>', is_last=True
  )
  assert parts[0] == tool_calls.TextPart(text='Hm', is_thought=True)
  content, ((name, arguments),) = joined(parts[1:])
  assert (content, name) == ('So:', 'f')
  assert json.loads(arguments) == json.loads(F[1])
  # What is no call stays as it is.
  text = '<call>{"a": 1}</call>'
  assert joined(make().push(text, is_last=True)) == (text, [])
