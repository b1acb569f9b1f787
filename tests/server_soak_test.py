"""A server under random load for long: nothing is lost, doubled or kept."""

import asyncio
import concurrent.futures
import gc
import itertools
import pathlib
import time

import jax
import numpy as np
import programs
import pytest
from absl import logging
from engine_cases import assert_empty
from server_cases import MODEL, NAME, client_of, make_service, serving

import swiftspec_jax as ss

NUM_CLIENTS = 7
FEW_PAGES = 40  # of 16 tokens: not enough for four long requests
MAX_GROWTH = 32 * 2**20  # bytes


def resident_bytes():
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * 4096


def make_requests():
  """Prompts and sampling, of which some are drawn and some are long."""
  rng = np.random.default_rng(0)
  requests = []
  for i in range(24):
    prompt = ''.join(rng.choice(list('abcdefg'), rng.integers(1, 200)))
    max_tokens, temperature = int(rng.integers(1, 350)), float(i % 2)
    options = {'max_tokens': max_tokens, 'temperature': temperature, 'seed': i}
    requests.append({'prompt': prompt, **options})
  return requests


def texts_alone(requests):
  sampling = [
    ss.SamplingParams(
      temperature=options['temperature'],
      seed=options['seed'],
      max_new_tokens=options['max_tokens'],
      ignore_eos=True,
    )
    for options in requests
  ]
  prompts = [options['prompt'] for options in requests]
  results = ss.generate(MODEL, prompts, sampling=sampling)
  return [result.text for result in results]


def call_of(options):
  return {**options, 'model': NAME, 'extra_body': {'ignore_eos': True}}


def play(address, seed, requests, texts, deadline):
  """A client: whole answers, streams, and streams that it leaves."""
  rng = np.random.default_rng(seed)
  num_whole, num_left = 0, 0
  with client_of(address) as client:
    while time.monotonic() < deadline:
      i = int(rng.integers(len(requests)))
      call = call_of(requests[i])
      kind = rng.choice(['whole', 'stream', 'left'])
      if kind == 'whole':
        text = client.completions.create(**call).choices[0].text
      else:
        most = int(rng.integers(1, 20)) if kind == 'left' else None
        with client.completions.create(**call, stream=True) as stream:
          pieces = [
            event.choices[0].text for event in itertools.islice(stream, most)
          ]
        text = ''.join(pieces)
      if kind == 'left':
        assert texts[i].startswith(text)
        num_left += 1
      else:
        assert text == texts[i]
        num_whole += 1
  return num_whole, num_left


def load(address, requests, texts, seconds):
  deadline = time.monotonic() + seconds
  with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
    clients = [
      pool.submit(play, address, seed, requests, texts, deadline)
      for seed in range(NUM_CLIENTS)
    ]
    return np.sum([client.result() for client in clients], axis=0)


def counts():
  """What may not become more: tasks, device arrays, bytes."""
  gc.collect()
  tasks = [x for x in gc.get_objects() if isinstance(x, asyncio.Task)]
  num_tasks = sum(not task.done() for task in tasks)
  return num_tasks, len(jax.live_arrays()), resident_bytes()


@pytest.mark.parametrize(
  'seconds', [1, pytest.param(30 * 60, marks=pytest.mark.slow)]
)
def test_random_load_leaves_nothing(seconds, caplog):
  """With cancellations, clients that go, and preemptions."""
  # A line for each call, all kept until the end, would look like a leak.
  caplog.set_level('WARNING', 'httpx2')
  requests = make_requests()
  texts = texts_alone(requests)
  service = make_service(num_pages=FEW_PAGES)
  service.engine.programs.compile_all()

  def settle():
    """Waits, and leaves the engine with what both kinds of requests need."""
    programs.wait_for(lambda: service.engine.num_requests == 0)
    with client_of(address) as client:
      # A greedy one, and then one that is drawn.
      client.completions.create(**call_of(requests[0]))
      client.completions.create(**call_of(requests[1]))
    programs.wait_for(lambda: service.engine.num_requests == 0)

  with serving(service) as address:
    load(address, requests, texts, min(seconds, 60))
    settle()
    before = counts()
    num_whole, num_left = load(address, requests, texts, seconds)
    settle()
    after = counts()
  logging.info(
    '%s answers, %s left, %s, %s', num_whole, num_left, before, after
  )
  assert num_whole > 0
  assert num_left > 0
  assert service.engine.scheduler.num_preemptions > 0
  assert_empty(service.engine, FEW_PAGES)
  assert after[0] <= before[0]
  assert after[1] <= before[1]
  assert after[2] - before[2] < MAX_GROWTH
