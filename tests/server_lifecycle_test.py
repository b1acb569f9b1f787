"""The HTTP server when clients go, too many come, and its end."""

import contextlib
import http.client
import json
import re
import signal
import socket

import openai
import programs
import pytest
import server_cases
from server_cases import (
  NAME,
  client_of,
  collect,
  error_of,
  fetch,
  make_service,
  serving,
)

import swiftspec_jax as ss
from swiftspec_jax.policies.fixed_length import FixedLength

UNAVAILABLE = 'service_unavailable_error'


@pytest.fixture(scope='module')
def slow():
  service = make_service(server_cases.Slow(), max_waiting=0)
  service.engine.programs.compile_all()
  with serving(service) as address, client_of(address) as client:
    yield service, client


QUESTION = {'model': NAME, 'prompt': 'a', 'max_tokens': 500}
LONG = {**QUESTION, 'extra_body': {'ignore_eos': True}}


@pytest.mark.parametrize('is_stream', [True, False])
def test_clients_that_go_are_forgotten(slow, is_stream):
  service, client = slow
  if is_stream:
    with client.completions.create(**LONG, stream=True) as stream:
      next(stream)
      assert service.engine.num_requests == 1
  else:
    connection = http.client.HTTPConnection(client.base_url.netloc.decode())
    body = json.dumps({**QUESTION, 'ignore_eos': True})
    headers = {'Content-Type': 'application/json'}
    connection.request('POST', '/v1/completions', body, headers)
    programs.wait_for(lambda: service.engine.num_requests == 1)
    connection.close()
  programs.wait_for(lambda: service.engine.num_requests == 0)
  assert service.metrics.registry.get_sample_value(
    'vllm:request_success_total',
    {'model_name': NAME, 'finished_reason': 'abort'},
  )


def test_full_queue(slow):
  service, client = slow
  with contextlib.ExitStack() as stack:
    for _ in range(server_cases.NUM_ROWS):
      stack.enter_context(client.completions.create(**LONG, stream=True))
    with pytest.raises(openai.RateLimitError) as refusal:
      client.completions.create(**LONG)
    assert refusal.value.response.headers['Retry-After'] == '1'
    assert 'of at most 4' in refusal.value.body['message']
  programs.wait_for(lambda: service.engine.num_requests == 0)
  server_cases.complete(client, max_tokens=1)


class Broken(FixedLength):
  def plan_draft(self, view):
    raise ArithmeticError(f'{view.num_rows} rows are too many')


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_failure_of_the_engine():
  with (
    serving(make_service(Broken(1))) as address,
    client_of(address) as client,
  ):
    for _ in range(2):
      with pytest.raises(openai.InternalServerError, match='has failed'):
        client.completions.create(**LONG)
    status, answer = fetch(f'{address}/health')
    assert (status, error_of(answer)['type']) == (503, UNAVAILABLE)


SIZES = ('--rows=2', '--query_tokens=8', '--contexts=512', '--max_length=2')


def test_program_ends_when_all_is_answered(model):
  with programs.running(
    'serve',
    f'--target={model}',
    *SIZES,
    '--policy=fixed_2',
    '--port=0',
    '--served_model_name=tiny',
  ) as process:
    programs.wait_for(lambda: '/v1\n' in process.output)
    address = re.search('tiny at (http://.*)/v1$', process.output, re.M)[1]
    with client_of(address) as client:
      messages = [{'role': 'user', 'content': 'Hello! ' * 9}]
      stream = client.chat.completions.create(
        model='tiny',
        messages=messages,
        stream=True,
        temperature=0,
        extra_body={'ignore_eos': True},
        stream_options={'include_usage': True},
      )
      next(stream)
      process.send(signal.SIGTERM)
      programs.wait_for(lambda: fetch(f'{address}/health')[0] == 503)
      with pytest.raises(openai.InternalServerError) as refusal:
        client.completions.create(model='tiny', prompt='a')
      assert refusal.value.status_code == 503
      texts, ends, _, usage = collect(stream)
    status, _, complaints = process.finish()
  assert (status, ends[0]) == (0, 'length'), complaints
  limits = {'max_new_tokens': usage.completion_tokens, 'ignore_eos': True}
  (result,) = ss.generate(
    ss.load(str(model)), [messages], sampling=ss.SamplingParams(**limits)
  )
  assert texts[0] == result.text
  assert usage.total_tokens == 512


def test_mistakes_in_flags_are_explained():
  listener = socket.create_server(('127.0.0.1', 0))
  port = listener.getsockname()[1]
  for flags, message in (
    (('--policy=table',), 'table needs --costs'),
    (('--temperature=0',), '--temperature has no effect on a server'),
    ((f'--port={port}',), f'cannot listen at 127.0.0.1:{port}'),
  ):
    assert message in programs.error_of('serve', *flags)
  listener.close()
