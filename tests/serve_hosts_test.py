"""A server on several processes: what it answers, and when one ends."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import time

import host_programs
import numpy as np
import openai
import programs
import pytest
import server_cases

import swiftspec_jax as ss
from swiftspec_jax import policies
from swiftspec_jax.cli import configuration
from swiftspec_jax.engine import host_sync, scoring
from swiftspec_jax.policies import from_process_zero
from swiftspec_jax.runtime import hosts

TREE = ('--width=2', '--num_draft_steps=2', '--branching=2')
PROMPT = 'hello hello hello'
MODEL_CHANGES = {'num_hidden_layers': 1}  # it drafts for itself


def test_requests_travel_whole():
  request = ss.Request(
    token_ids=(3, 1),
    sampling=ss.SamplingParams(
      temperature=0.1,
      logit_bias={7: -0.3},
      banned_token_ids=(2,),
      forced_token_ids=(5, 6),
      stop=('\n', 'x'),
      stop_token_ids=(9,),
      max_new_tokens=None,
    ),
  )
  sent = json.dumps(host_sync.request_to_json(request))
  assert host_sync.request_of(json.loads(sent)) == request


def test_choices_travel_whole(monkeypatch):
  plan = policies.DraftPlan(
    lengths=np.array([2, 0]),
    is_probe=np.array([False, True]),
    expected_tokens=1.5,
  )
  monkeypatch.setattr(
    hosts, 'from_process_zero', lambda make: json.loads(json.dumps(make()))
  )
  policy = from_process_zero.FromProcessZero(Planned(plan))
  found = policy.plan_draft(None)
  for field in dataclasses.fields(plan):
    values = getattr(found, field.name), getattr(plan, field.name)
    np.testing.assert_array_equal(*values)
    assert type(values[0]) is type(values[1])
  assert policy.plan_verify(None, found, found).tolist() == [2, 0]


class Planned(policies.Policy):
  def __init__(self, plan):
    self._plan = plan

  def plan_draft(self, view):
    return self._plan


@contextlib.contextmanager
def serving(folder, model, *flags, count):
  """Yields a server on `count` processes of two devices each, and a client."""
  together = host_programs.Together(
    folder,
    'serve',
    f'--target={model}',
    '--served_model_name=tiny',
    '--port=0',
    '--simulated_devices=2',
    '--rows=2',
    '--query_tokens=16',
    '--contexts=128',
    *flags,
    environments=[{}] * count,
  )
  try:
    programs.wait_for(lambda: '/v1' in together.output(0))
    address = re.search('tiny at (http://.*)/v1$', together.output(0), re.M)[1]
    with server_cases.client_of(address) as client:
      yield together, client
  except BaseException as error:
    error.add_note(str(together.kill()))
    raise


def complete(client, **options):
  return client.completions.create(
    **{'model': 'tiny', 'prompt': PROMPT, 'max_tokens': 24, **options}
  )


def alone(model, prompts=(PROMPT,), **options):
  sampling = ss.SamplingParams(max_new_tokens=24, **options)
  results = ss.generate(
    ss.load(model), prompts, sampling=sampling, use_chat_template=False
  )
  return [result.text for result in results]


def check(client, model):
  """Requests beside each other, of which one goes, as one process has them."""
  with complete(
    client, temperature=0, stream=True, extra_body={'ignore_eos': True}
  ) as leaving:
    next(leaving)
    stream = complete(client, temperature=1, seed=3, stream=True)
    next(leaving)
  texts, *_ = server_cases.collect(stream)
  assert [texts[0]] == alone(model, temperature=1.0, seed=3)
  (choice,) = complete(client, temperature=0, logprobs=1, echo=True).choices
  assert [choice.text] == [PROMPT + text for text in alone(model)]
  # All processes rate the prompt together.
  token_ids = list(PROMPT.encode())
  rated = scoring.score(ss.load(model), token_ids, 1)
  found = choice.logprobs.token_logprobs[1 : len(token_ids)]
  np.testing.assert_allclose(found, rated.chosen, atol=1e-4)


def check_load(client, model):
  """More requests at once than there are rows: whole, streamed, cancelled."""
  prompts = [f'{PROMPT} {i}' for i in range(2)]
  sampled = {'temperature': 1.0, 'seed': 3}

  def ask(prompt, **options):
    return complete(client, prompt=prompt, **options).choices[0].text

  def stream(prompt, **options):
    texts, *_ = server_cases.collect(
      complete(client, prompt=prompt, **options, stream=True)
    )
    return texts[0]

  def leave(prompt, **options):
    options = options | {'extra_body': {'ignore_eos': True}}
    with complete(client, prompt=prompt, **options, stream=True) as leaving:
      next(leaving)

  with concurrent.futures.ThreadPoolExecutor(16) as threads:
    found = [
      [threads.submit(way, prompt, **options) for prompt in prompts]
      for options in ({'temperature': 0}, sampled)
      for way in (ask, leave, stream)
    ]
  greedy, drawn = alone(model, prompts), alone(model, prompts, **sampled)
  texts = [[future.result() for future in futures] for futures in found]
  gone = [None] * len(prompts)
  assert texts == [greedy, gone, greedy, drawn, gone, drawn]


def check_figures(client, num_requests):
  """All have ended, and counts agree with each other."""

  def figures_of():
    address = str(client.base_url).removesuffix('/v1/')
    return server_cases.figures(address)

  name = 'vllm:request_success_total'
  programs.wait_for(lambda: figures_of()[name] == num_requests)
  figures = figures_of()
  accepted, drafted, drafts = (
    figures[f'vllm:spec_decode_num_{name}_total']
    for name in ('accepted_tokens', 'draft_tokens', 'drafts')
  )
  assert 0 < accepted <= drafted <= 2 * drafts
  for name in ('running', 'waiting'):
    assert figures[f'vllm:num_requests_{name}'] == 0


def stop(together):
  """Ends a server as a cluster does, which tells all processes."""
  for process_id in reversed(together.process_ids):
    os.kill(process_id, signal.SIGTERM)
  results = together.finish()
  assert all(status == 0 for status, _, _ in results), results
  assert not any(output for _, output, _ in results[1:]), results


def check_end(together, client):
  """Nobody waits for a process that is killed, and all say which one it was."""
  options = {'temperature': 0, 'extra_body': {'ignore_eos': True}}
  stream = complete(client, **options, stream=True, max_tokens=100)
  next(stream)
  os.kill(together.process_ids[1], signal.SIGKILL)
  killed = time.monotonic()
  with pytest.raises(openai.APIError, match='the engine has failed'):
    list(stream)
  results = together.finish()
  assert time.monotonic() - killed < 30
  (status, _, complaints), (killed_status, *_) = results
  assert (status, killed_status) == (1, -signal.SIGKILL)
  assert complaints.splitlines()[-1].startswith('error: process 1 has ended')
  assert complaints.count('error') == 1, complaints


@pytest.mark.ci
def test_two_hosts_share_the_target(model, tmp_path):
  with serving(
    tmp_path,
    model,
    '--mode=prompt_lookup',
    '--max_length=2',
    '--policy=fixed_2',  # others draft as much as the machine makes pay
    count=2,
  ) as (together, client):
    check(client, model)
    check_load(client, model)
    check_figures(client, num_requests=3 + 12)
    check_end(together, client)


@pytest.mark.ci
@pytest.mark.parametrize(
  ('count', 'flags'),
  [
    (2, ('--mode=chain', '--max_length=2', '--policy=fixed_2')),
    (3, ('--mode=async', '--num_nodes=4', *TREE, '--policy=fixed_3')),
  ],
)
def test_drafts_of_a_model(model, tmp_path, count, flags):
  """In mode async the last process has no part of the target."""
  with serving(tmp_path, model, f'--draft={model}', *flags, count=count) as (
    together,
    client,
  ):
    check(client, model)
    stop(together)


@pytest.mark.ci
def test_sizes_of_a_configuration(model, tmp_path):
  sizes = {'mode': 'serial', 'num_nodes': 4, 'width': 2, 'num_draft_steps': 2}
  path = tmp_path / 'config.json'
  configuration.write(path, sizes, [], device_kind=None)
  flags = f'--config={path}', f'--draft={model}', '--branching=2'
  with serving(tmp_path, model, *flags, count=2) as (together, client):
    (served,) = client.models.list().data
    assert served.speculation['max_tokens'] == 3
    check(client, model)
    stop(together)


@pytest.mark.ci
def test_requests_are_answered_where_the_target_is(model, tmp_path):
  results = host_programs.Together(
    tmp_path,
    'serve',
    f'--target={model}',
    f'--draft={model}',
    '--mode=async',
    '--target_processes=1',
    '--draft_processes=0',
    environments=[{}] * 2,
  ).finish()
  for status, output, complaints in results:
    assert (status, output) == (1, '')
    assert complaints.startswith('error: ')
    assert '--target_processes=1 must contain 0' in complaints
    assert complaints.count('\n') == 1
