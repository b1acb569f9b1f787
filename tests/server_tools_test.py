"""What programs send: tools, other ways to ask, and other pages."""

import dataclasses
import json

import numpy as np
import openai
import pytest
import server_cases
from decoding_cases import tokenizer_of
from server_cases import ask, client_of, fetch, make_service, serving
from tool_calls_test import FUNCTION, RIGHT, TEMPLATE, TOOLS

from swiftspec_jax import testing
from swiftspec_jax.server import fill_in

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


def make_caller():
  """A model that calls a tool, and again if it may not end."""
  table = np.eye(8)[[1, 2, 3, 4, 5, 7, 7, 6]]
  table[5, [2, 7]] = 0.4, 0.6
  model = testing.table_model(table, name=server_cases.NAME, eos_token_ids=[7])
  options = {'chat_template': TEMPLATE, 'clean_up_tokenization_spaces': False}
  tokenizer = tokenizer_of(TOKENS, special=['<end>'], **options)
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
  assert call.function.arguments == RIGHT
  for is_parallel in (True, False):
    options = {**TWICE, 'parallel_tool_calls': is_parallel}
    (choice,) = client.chat.completions.create(**ASKED, **options).choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == 'length'
    assert len({call.id for call in calls}) == 1 + is_parallel
    assert {call.function.arguments for call in calls} == {RIGHT}
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
    assert ''.join(pieces) == RIGHT
  *_, last = client.chat.completions.create(**ASKED, stream=True)
  assert last.choices[0].finish_reason == 'tool_calls'
  # The client's own accumulation of events agrees.
  with client.chat.completions.stream(**ASKED) as events:
    (choice,) = events.get_final_completion().choices
  assert choice.message.tool_calls[0].function.arguments == RIGHT


def test_calls_go_back_with_what_they_gave(client):
  message = client.chat.completions.create(**ASKED).choices[0].message
  call_id = message.tool_calls[0].id
  result = {'role': 'tool', 'tool_call_id': call_id, 'content': '3'}
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


def test_pages_of_others(address):
  for origin, is_allowed in (('https://a.example', True), ('null', False)):
    asked = {'Origin': origin, 'Access-Control-Request-Method': 'POST'}
    path = '/v1/chat/completions'
    answer, _ = ask(address, path, method='OPTIONS', **asked)
    assert (answer.status == 200) == is_allowed
    found = answer.headers['Access-Control-Allow-Origin']
    assert found == (origin if is_allowed else None)


def test_other_methods_and_probes(address):
  answer, text = ask(address, '/health', method='HEAD')
  assert (answer.status, text) == (200, '')
  assert int(answer.headers['Content-Length'])
  answer, _ = ask(address, '/v1/completions', method='OPTIONS')
  assert (answer.status, answer.headers['Allow']) == (204, 'POST')
  assert fetch(f'{address}/ping')[0] == 200
  assert 'version' in json.loads(fetch(f'{address}/version')[1])
  answer, _ = ask(address, '/ping', **{'X-Request-Id': 'mine'})
  assert answer.headers['X-Request-Id'] == 'mine'


def test_token_ids(address):
  def ids(body):
    status, text = fetch(f'{address}/tokenize', body)
    return json.loads(text)['tokens'] if status == 200 else status

  assert ids({'prompt': 'aa'}) == [0, 0]
  assert ids({'messages': ASKED['messages']}) == [0, 0]
  assert ids({'prompt': 'a', 'messages': ASKED['messages']}) == 400
  url = f'{address}/detokenize'
  answer = fetch(url, {'tokens': [0, 1]})[1]
  assert json.loads(answer) == {'prompt': 'aSo:'}
  assert fetch(url, {'tokens': [8]})[0] == 400


def test_suffix(client):
  asked = {'model': server_cases.NAME, 'prompt': 'a', 'suffix': 'b'}
  with pytest.raises(openai.BadRequestError, match='has no tokens to fill in'):
    client.completions.create(**asked)
  tokenizer = testing.byte_tokenizer()
  tokenizer.add_tokens(['<fim_prefix>', '<fim_suffix>', '<fim_middle>'])
  prompt = fill_in.prompt_of(tokenizer, 'a', 'b')
  assert prompt == '<fim_prefix>a<fim_suffix>b<fim_middle>'


def test_responses(client):
  asked = {'model': server_cases.NAME, 'input': 'a', 'temperature': 0}
  asked['tools'] = [{'type': 'function', **FUNCTION, 'strict': None}]
  answer = client.responses.create(**asked)
  message, call = answer.output
  assert (answer.status, answer.output_text) == ('completed', 'So:')
  assert (call.name, call.arguments) == ('add', RIGHT)
  assert answer.usage.output_tokens == 6
  kind = 'function_call_output'
  result = {'type': kind, 'call_id': call.call_id, 'output': '3'}
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
  assert found.output[1].arguments == RIGHT
  cut = client.responses.create(**asked, max_output_tokens=1)
  assert cut.incomplete_details.reason == 'max_output_tokens'
  with pytest.raises(openai.BadRequestError, match='not supported by this'):
    client.responses.create(**asked, previous_response_id='resp_1')
