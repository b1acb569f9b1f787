"""A server in a thread, of a model whose tokens are letters."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time

import openai
import programs
from decoding_cases import sizes_of
from decoding_test import markov_table

import swiftspec_jax as ss
from swiftspec_jax import policies, testing
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.server import run
from swiftspec_jax.server.service import Service

NAME = 'letters'
MAX_CONTEXT = 600
NUM_ROWS = 4
LENGTH = 3  # of drafts
TABLE = markov_table(8, seed=5)


def make_model():
  """Its distribution is a table over a to h, h ends the text; it can chat."""
  model = testing.table_model(TABLE, name=NAME, eos_token_ids=[7])
  model.tokenizer.chat_template = (
    '{% for message in messages %}{{ message.content }}{% endfor %}'
  )
  return model


MODEL = make_model()


class Slow(policies.Policy):
  """Never speculates, and takes its time."""

  def plan_draft(self, view):
    time.sleep(0.01)
    return policies.DraftPlan(lengths=view.limits * 0)


def make_service(
  policy=None,
  num_pages=200,
  rows=(NUM_ROWS,),
  model=MODEL,
  max_context=MAX_CONTEXT,
  **options,
):
  buckets = {'query_tokens': (24,), 'lengths': (*range(LENGTH + 1),)}
  engine = Engine(
    model,
    ss.PromptLookup(prompt_lookup_min=1),
    sizes=sizes_of(num_pages, max_context, rows=rows, **buckets),
    policy=policy or FixedLength(LENGTH),
  )
  return Service(engine, model, **options)


@contextlib.contextmanager
def serving(service, **options):
  """Runs a server in a thread; yields its address."""
  listener = socket.socket()
  listener.bind(('127.0.0.1', 0))
  port = listener.getsockname()[1]
  server = run.Server(service, **options)
  thread = threading.Thread(target=server.serve_on, args=(listener,))
  thread.start()
  try:
    programs.wait_for(lambda: server.started)
    yield f'http://127.0.0.1:{port}'
  finally:
    server.stop()
    thread.join(60)
  assert not thread.is_alive()


def client_of(address, **options):
  return openai.OpenAI(
    base_url=f'{address}/v1', api_key='none', max_retries=0, **options
  )


def complete(client, prompt='a', **options):
  return client.completions.create(model=NAME, prompt=prompt, **options)


def ask(address, path, body=None, method=None, **headers):
  """Returns an answer and its text; with a body, which may be a dict, posts."""
  connection = http.client.HTTPConnection(address.removeprefix('http://'))
  method = method or ('GET' if body is None else 'POST')
  body = json.dumps(body) if isinstance(body, dict) else body
  headers = {'Content-Type': 'application/json', **headers}
  with contextlib.closing(connection):
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def fetch(url, body=None):
  """Returns status and text of what there is; with a body it is posted."""
  address, path = url.removeprefix('http://').split('/', 1)
  answer, text = ask(address, f'/{path}', body)
  return answer.status, text


def figures(address):
  """Values of the metrics by name, summed over labels but position."""
  values = {}
  for line in fetch(f'{address}/metrics')[1].splitlines():
    if line.startswith('#'):
      continue
    series, value = line.rsplit(' ', 1)
    position = re.search('position="(.)"', series)
    name = series.split('{')[0] + (position[1] if position else '')
    values[name] = values.get(name, 0) + float(value)
  return values


def error_of(answer):
  return json.loads(answer)['error']


def collect(stream):
  """Texts, ends and logprobs of the choices of a stream, and its usage."""
  texts, ends, logprobs, usage = {}, {}, {}, None
  for event in stream:
    usage = event.usage or usage
    for choice in event.choices:
      if event.object == 'text_completion':
        text, new = choice.text, choice.logprobs and choice.logprobs.tokens
      else:
        text = choice.delta.content
        new = choice.logprobs and [t.token for t in choice.logprobs.content]
      i = choice.index
      assert i not in ends, 'news after the end'
      texts[i] = texts.get(i, '') + text
      logprobs[i] = logprobs.get(i, []) + (new or [])
      if choice.finish_reason:
        ends[i] = choice.finish_reason
  return texts, ends, logprobs, usage
