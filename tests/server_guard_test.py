"""What a request must show before the server reads it."""

import asyncio
import http.client
import json

import openai
import pytest
from server_cases import (
  MAX_CONTEXT,
  MODEL,
  NAME,
  error_of,
  make_service,
  serving,
)

from swiftspec_jax.server import prompts

KEYS = ('first-key', 'Schlüssel')
LIMIT = 2_000  # bytes of a body
SHORT = json.dumps({'prompt': 'a', 'max_tokens': 1}).encode()


@pytest.fixture(scope='module')
def address():
  options = {'api_keys': KEYS, 'max_body_bytes': LIMIT}
  with serving(make_service(), **options) as address:
    yield address


@pytest.fixture(scope='module')
def connection(address):
  connection = http.client.HTTPConnection(address.removeprefix('http://'))
  yield connection
  connection.close()


def ask(connection, method='POST', path='/v1/completions', **options):
  """Status, headers and text of an answer."""
  connection.request(method, path, **options)
  answer = connection.getresponse()
  return answer.status, answer.headers, answer.read().decode()


@pytest.mark.parametrize(
  ('path', 'authorization', 'status'),
  [
    ('/v1/models', None, 401),
    ('/v1/models', '', 401),
    ('/v1/models', 'Bearer', 401),
    ('/v1/models', 'Bearer ', 401),
    ('/v1/models', 'Bearer first-ke', 401),
    ('/v1/models', 'Bearer first-key2', 401),
    ('/v1/models', 'Basic first-key', 401),
    ('/v1/models', 'first-key', 401),
    ('/v1/nothing', None, 401),
    ('/v1/models', 'Bearer first-key', 200),
    ('/v1/models', 'bearer first-key', 200),
    ('/v1/models', 'Bearer Schlüssel'.encode(), 200),
    ('/v1/nothing', 'Bearer first-key', 404),
    # As in vLLM: for probes and Prometheus.
    ('/health', None, 200),
    ('/metrics', None, 200),
  ],
)
def test_v1_needs_a_key(connection, path, authorization, status):
  headers = {} if authorization is None else {'Authorization': authorization}
  found, headers, text = ask(connection, 'GET', path, headers=headers)
  assert found == status
  if status == 401:
    assert headers['WWW-Authenticate'] == 'Bearer'
    assert error_of(text)['code'] == 'invalid_api_key'
    assert not any(key in text for key in KEYS)


def test_openai_client_takes_a_key(address):
  options = {'base_url': f'{address}/v1', 'max_retries': 0}
  with openai.OpenAI(api_key=KEYS[0], **options) as client:
    assert client.models.list().data[0].id == NAME
  with (
    openai.OpenAI(api_key='other', **options) as client,
    pytest.raises(openai.AuthenticationError, match='needs an API key'),
  ):
    client.models.list()


HEADERS = {
  'Authorization': f'Bearer {KEYS[0]}',
  'Content-Type': 'application/json',
}


def padded(size):
  return SHORT + b' ' * (size - len(SHORT))


@pytest.mark.parametrize('is_chunked', [False, True])
def test_large_bodies_are_refused(connection, is_chunked):
  """The connection stays usable."""
  for size in (LIMIT, LIMIT + 1, 300_000):
    body = padded(size)
    if is_chunked:
      body = iter([body[:1_000], body[1_000:]])
    status, _, text = ask(connection, body=body, headers=HEADERS)
    if size == LIMIT:
      assert status == 200, text
    else:
      assert status == 413
      error = error_of(text)
      assert error['message'] == f'the body has more than {LIMIT} bytes'
      assert error['type'] == 'invalid_request_error'


def test_a_body_without_a_key_is_not_read(connection):
  headers = {'Expect': '100-continue', 'Content-Length': str(10**9)}
  connection.putrequest('POST', '/v1/completions')
  for item in headers.items():
    connection.putheader(*item)
  connection.endheaders()
  assert connection.getresponse().status == 401
  connection.close()


@pytest.mark.parametrize('kind', ['completions', 'chat/completions'])
def test_long_texts_are_refused(connection, kind):
  length = MAX_CONTEXT * max(map(len, MODEL.tokenizer.get_vocab())) + 1
  body = {'model': NAME}
  if kind == 'completions':
    body['prompt'] = 'a' * length
  else:
    parts = 'a' * (length - 1), 'a'
    body['messages'] = [{'role': 'user', 'content': part} for part in parts]
  path, body = f'/v1/{kind}', json.dumps(body)
  status, _, text = ask(connection, path=path, body=body, headers=HEADERS)
  assert status == 400
  assert f'the prompt has {length} characters' in error_of(text)['message']


def test_the_event_loop_goes_on_while_prompts_are_encoded():
  encoder = prompts.PromptEncoder(MODEL.tokenizer, max_context=10**6)

  async def count_turns():
    encoding = asyncio.ensure_future(encoder.encode(['ab' * 200_000]))
    num_turns = 0
    while not encoding.done():
      await asyncio.sleep(0.001)
      num_turns += 1
    return num_turns, await encoding

  num_turns, (token_ids,) = asyncio.run(count_turns())
  assert num_turns > 3
  assert token_ids == (0, 1) * 200_000
