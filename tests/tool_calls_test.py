"""Calls of tools: found in texts, offered to models, told to clients."""

import dataclasses
import http.client
import json
import random

import numpy as np
import openai
import pytest
import server_cases
import tokenizers
import transformers
from server_cases import client_of, fetch, make_service, serving
from tokenizers import decoders, models, pre_tokenizers

from swiftspec_jax import grammar, testing
from swiftspec_jax.server import schema, tool_calls, tool_choice

F, G = ('f', '{"x": "}]\\"{\\\\", "y": [1, {}]}'), ('g', '{}')
JSON_F = f'{{"name": "f", "arguments": {F[1]}}}'
LLAMA_F = JSON_F.replace('arguments', 'parameters')
# The format, a text, and its content and calls.
TEXTS = [
  ('hermes', f'<tool_call>\n{JSON_F}\n</tool_call>', '', [F]),
  (
    'hermes',
    f'So:\n<tool_call>{JSON_F}</tool_call>\n<tool_call>{{"name": "g"}}'
    '</tool_call>\n',
    'So:',
    [F, G],
  ),
  ('hermes', f'<tool_call>{JSON_F}</tool_call> Done.', ' Done.', [F]),
  ('hermes', '<tool_call>\n{"name": "f", "arguments": {"x', '', [('f', '{"x')]),
  ('hermes', 'a <tool_call> b', 'a <tool_call> b', []),
  ('hermes', f'{JSON_F}\n', '', [F]),
  ('hermes', f'```json\n{JSON_F}\n```', '', [F]),
  ('hermes', f'{JSON_F}\n{{"name": "g"}}', '', [F, G]),
  ('hermes', f'As {JSON_F}', f'As {JSON_F}', []),
  (
    'llama3_json',
    f'{LLAMA_F}; {{"name": "g", "parameters": {{}}}}',
    '',
    [F, G],
  ),
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


# The model says these tokens one after the other.
TOKENS = (
  'a',
  'So:',
  '<tool_call>\n{"name": "add", ',
  '"arguments": {"x": 1',
  ', "y": 2}',
  '}\n</tool_call>',
  'Three.',
  '<end>',
)
ARGUMENTS = '{"x": 1, "y": 2}'


def make_caller():
  """A model that calls a tool, and again if it may not end."""
  table = np.eye(8)[[1, 2, 3, 4, 5, 7, 7, 6]]
  table[5, [2, 7]] = 0.4, 0.6
  model = testing.table_model(table, name=server_cases.NAME, eos_token_ids=[7])
  spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  spelled = [spell.pre_tokenize_str(token)[0][0] for token in TOKENS]
  vocabulary = {token: i for i, token in enumerate(spelled)}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.add_special_tokens(['<end>'])
  backend.pre_tokenizer, backend.decoder = spell, decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    chat_template=TEMPLATE,
    clean_up_tokenization_spaces=False,
  )
  return dataclasses.replace(model, tokenizer=tokenizer)


@pytest.fixture(scope='module')
def address():
  service = make_service(model=make_caller())
  with serving(service, allowed_origins=['https://a.example']) as address:
    yield address


@pytest.fixture(scope='module')
def client(address):
  with client_of(address) as client:
    yield client


ASKED = {
  'model': server_cases.NAME,
  'messages': [{'role': 'user', 'content': 'a'}],
  'temperature': 0,
  'tools': TOOLS,
}
TWICE = {'logit_bias': {'7': -100}, 'max_tokens': 9}


def test_calls_of_an_answer(client):
  (choice,) = client.chat.completions.create(**ASKED).choices
  assert choice.finish_reason == 'tool_calls'
  assert choice.message.content == 'So:'
  (call,) = choice.message.tool_calls
  assert (call.type, call.function.name) == ('function', 'add')
  assert call.function.arguments == ARGUMENTS
  for is_parallel in (True, False):
    options = {**TWICE, 'parallel_tool_calls': is_parallel}
    (choice,) = client.chat.completions.create(**ASKED, **options).choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == 'length'
    assert len({call.id for call in calls}) == 1 + is_parallel
    assert {call.function.arguments for call in calls} == {ARGUMENTS}
  # Nothing is looked for where no tool is offered.
  del (without := dict(ASKED))['tools']
  for options in (without, {**ASKED, 'tool_choice': 'none'}):
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.message.content == ''.join(TOKENS[1:6])
    assert choice.finish_reason == 'stop'


def test_calls_of_a_stream(client):
  options = {**TWICE, 'extra_body': {'max_speculative_tokens': 0}}
  stream = client.chat.completions.create(**ASKED, **options, stream=True)
  deltas = [event.choices[0].delta for event in stream]
  assert ''.join(delta.content or '' for delta in deltas) == 'So:'
  calls = [call for delta in deltas for call in delta.tool_calls or []]
  assert [call.index for call in calls] == [0, 0, 0, 1, 1, 1]
  for first, *others in (calls[:3], calls[3:]):
    assert first.id
    assert (first.function.name, first.function.arguments) == ('add', '')
    assert {call.id or call.function.name for call in others} == {None}
    pieces = [call.function.arguments for call in others]
    assert ''.join(pieces) == ARGUMENTS
  *_, last = client.chat.completions.create(**ASKED, stream=True)
  assert last.choices[0].finish_reason == 'tool_calls'
  # The client's own accumulation of events agrees.
  with client.chat.completions.stream(**ASKED) as events:
    (choice,) = events.get_final_completion().choices
  assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


def test_calls_go_back_with_what_they_gave(client):
  answer = client.chat.completions.create(**ASKED)
  message = answer.choices[0].message
  result = {
    'role': 'tool',
    'tool_call_id': message.tool_calls[0].id,
    'content': '3',
  }
  messages = [*ASKED['messages'], message, result]
  again = client.chat.completions.create(**{**ASKED, 'messages': messages})
  assert again.choices[0].message.content == 'Three.'


def test_usage_during_a_stream(client):
  def counts(**options):
    events = client.chat.completions.create(
      **ASKED,
      stream=True,
      stream_options={'include_usage': True, **options},
      extra_body={'max_speculative_tokens': 0},
    )
    return [event.usage and event.usage.completion_tokens for event in events]

  assert counts() == [None] * 6 + [6]
  assert counts(continuous_usage_stats=True) == [0, 1, 3, 3, 4, 6, 6]


def ask(address, method, path, **headers):
  connection = http.client.HTTPConnection(address.removeprefix('http://'))
  connection.request(method, path, headers=headers)
  answer = connection.getresponse()
  text = answer.read().decode()
  connection.close()
  return answer.status, answer.headers, text


def test_pages_of_others(address):
  for origin, is_allowed in (('https://a.example', True), ('null', False)):
    status, headers, _ = ask(
      address,
      'OPTIONS',
      '/v1/chat/completions',
      **{'Origin': origin, 'Access-Control-Request-Method': 'POST'},
    )
    assert (status == 200) == is_allowed
    found = headers['Access-Control-Allow-Origin']
    assert found == (origin if is_allowed else None)


def test_other_methods_and_probes(address):
  status, headers, text = ask(address, 'HEAD', '/health')
  assert (status, text) == (200, '')
  assert int(headers['Content-Length'])
  status, headers, _ = ask(address, 'OPTIONS', '/v1/completions')
  assert (status, headers['Allow']) == (204, 'POST')
  assert fetch(f'{address}/ping')[0] == 200
  assert 'version' in json.loads(fetch(f'{address}/version')[1])
  _, headers, _ = ask(address, 'GET', '/ping', **{'X-Request-Id': 'mine'})
  assert headers['X-Request-Id'] == 'mine'


def test_token_ids(address):
  def ids(body):
    status, text = fetch(f'{address}/tokenize', json.dumps(body).encode())
    return json.loads(text)['tokens'] if status == 200 else status

  assert ids({'prompt': 'aa'}) == [0, 0]
  assert ids({'messages': ASKED['messages']}) == [0, 0]
  assert ids({'prompt': 'a', 'messages': ASKED['messages']}) == 400
  url = f'{address}/detokenize'
  answer = fetch(url, b'{"tokens": [0, 1]}')[1]
  assert json.loads(answer) == {'prompt': 'aSo:'}
  assert fetch(url, b'{"tokens": [8]}')[0] == 400


def test_suffix(client):
  with pytest.raises(openai.BadRequestError, match='has no tokens to fill in'):
    client.completions.create(model=server_cases.NAME, prompt='a', suffix='b')


def test_responses(client):
  asked = {
    'model': server_cases.NAME,
    'input': 'a',
    'temperature': 0,
    'tools': [{'type': 'function', **FUNCTION, 'strict': None}],
  }
  answer = client.responses.create(**asked)
  message, call = answer.output
  assert (answer.status, answer.output_text) == ('completed', 'So:')
  assert (call.name, call.arguments) == ('add', ARGUMENTS)
  assert answer.usage.output_tokens == 6
  result = {
    'type': 'function_call_output',
    'call_id': call.call_id,
    'output': '3',
  }
  items = [{'role': 'user', 'content': 'a'}, message, call, result]
  again = client.responses.create(**{**asked, 'input': items})
  assert again.output_text == 'Three.'
  # The client puts the events together itself.
  with client.responses.stream(**asked) as events:
    kinds = [event.type for event in events]
    found = events.get_final_response()
  assert kinds[0], kinds[-1] == ('response.created', 'response.completed')
  assert [item.type for item in found.output] == ['message', 'function_call']
  assert found.output_text == 'So:'
  assert found.output[1].arguments == ARGUMENTS
  cut = client.responses.create(**asked, max_output_tokens=1)
  assert cut.incomplete_details.reason == 'max_output_tokens'
  with pytest.raises(openai.BadRequestError, match='not supported by this'):
    client.responses.create(**asked, previous_response_id='resp_1')
