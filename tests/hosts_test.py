"""Several processes: what they decode, refuse, and say when one ends."""

import concurrent.futures
import dataclasses
import os
import queue
import re
import signal
import socket
import threading
import time

import host_programs
import programs
import pytest

import swiftspec_jax as ss
from swiftspec_jax import errors, testing
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.runtime import connections, hosts

TREE = ('--num_nodes=4', '--width=2', '--num_draft_steps=2', '--branching=2')


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """A model that drafts for itself."""
  directory = tmp_path_factory.mktemp('models') / 'tiny'
  testing.write_tiny_checkpoint(directory, num_hidden_layers=1)
  return directory


@pytest.fixture
def prompts(tmp_path):
  return programs.write_prompts(tmp_path, 'hello hello')


def flags_of(model):
  return (f'--target={model}', f'--draft={model}', '--max_new_tokens=16', *TREE)


def benchmark(folder, *flags, count):
  """The output of each mode of a benchmark with one prompt on some hosts."""
  results = folder / 'results'
  flags = (*flags, f'--output_dir={results}')
  host_programs.run(folder, 'benchmark', *flags, count=count)
  lines = programs.read_lines(results, 'results.jsonl')
  return {line['mode']: tuple(line['token_ids']) for line in lines}


def test_target_and_draft_on_different_hosts(model, tmp_path):
  """Process 0 says the same as one process alone, and process 1 nothing."""
  (expected,) = ss.generate(ss.load(model), 'hello', max_new_tokens=16)
  outputs = host_programs.run(
    tmp_path,
    'generate',
    *flags_of(model),
    '--prompt=hello',
    '--mode=async',
    count=2,
  )
  assert outputs == [f'{expected.text}\n', '']


def save_with_head(model, target_directory, draft_directory):
  """Saves a model in our own format, and a draft that needs much of it.

  The draft shares its embedding and reads its features.
  """
  target = ss.load(model)
  ss.save(target, target_directory)
  config = dataclasses.replace(
    target.config, feature_layers=(0,), feature_dim=target.config.embed_dim
  )
  random = testing.random_model(config).params
  params = {
    **random,
    **target.params,
    'feature_fusion': 0.05 * random['feature_fusion'],
  }
  del params['embedding']
  draft_lib.save(draft_directory, config, params, target)
  return target


@pytest.mark.ci
def test_three_hosts(model, prompts, tmp_path):
  """Two share the target, which does not have the draft's number of devices."""
  saved, head = tmp_path / 'saved', tmp_path / 'head'
  target = save_with_head(model, saved, head)
  (expected,) = ss.generate(target, 'hello hello', max_new_tokens=16)
  found = benchmark(
    tmp_path,
    f'--target={saved}',
    f'--draft={head}',
    '--max_new_tokens=16',
    *TREE,
    f'--prompts={prompts}',
    '--modes=autoregressive,serial,async',
    '--draft_processes=2',
    count=3,
  )
  modes = 'autoregressive', 'serial', 'async'
  assert found == dict.fromkeys(modes, expected.token_ids)


@pytest.mark.ci
def test_two_hosts_share_both_models(model, prompts, tmp_path):
  """Sampling, with two devices each, gives what one process samples."""
  found = benchmark(
    tmp_path,
    *flags_of(model),
    f'--prompts={prompts}',
    '--temperature=1',
    '--modes=prompt_lookup,chain,async,suffix_lookup,tree',
    '--simulated_devices=2',
    '--target_processes=0,1',
    '--draft_processes=0,1',
    '--target_devices=1',
    '--draft_devices=1',
    count=2,
  )
  target = ss.load(model)
  sampling = ss.SamplingParams(temperature=1.0, max_new_tokens=16)
  plain, chain = (
    ss.generate(target, 'hello hello', sampling=sampling, draft=draft)
    for draft in (None, ss.load(model, draft_of=target))
  )
  assert found.pop('chain') == chain[0].token_ids
  modes = 'prompt_lookup', 'async', 'suffix_lookup', 'tree'
  assert found == dict.fromkeys(modes, plain[0].token_ids)


@pytest.mark.ci
def test_a_killed_process_ends_the_others(model, tmp_path):
  together = host_programs.Together(
    tmp_path,
    'generate',
    f'--target={model}',
    '--prompt=hello',
    '--max_new_tokens=1000',
    '--mode=autoregressive',
    environments=[{}] * 3,
  )
  programs.wait_for(lambda: together.output(0))  # decodes
  os.kill(together.process_ids[1], signal.SIGKILL)
  killed = time.monotonic()
  results = together.finish()
  assert time.monotonic() - killed < 30
  assert [status for status, _, _ in results] == [1, -signal.SIGKILL, 1]
  for i in (0, 2):
    complaints = results[i][2].splitlines()
    assert complaints[-1].startswith('error: process 1 has ended')
    assert len([x for x in complaints if x.startswith('error')]) == 1


@pytest.mark.ci
def test_another_model_of_the_same_name_is_refused(tmp_path):
  homes = [tmp_path / f'home-{i}' for i in range(2)]
  for seed, home in enumerate(homes):
    testing.write_tiny_checkpoint(home / 'model', seed=seed)
  results = host_programs.Together(
    tmp_path,
    'generate',
    '--target=~/model',
    '--prompt=hello',
    environments=[{'HOME': str(home)} for home in homes],
  ).finish()
  for status, output, complaints in results:
    assert (status, output) == (1, '')
    assert complaints.startswith('error: ')
    assert 'content of ~/model differs: ' in complaints
    assert complaints.count('\n') == 1


FACTS = {'--seed': 0, 'jax': '0.10.2'}


def meet(*calls, on_end=None, timeout=10):
  """Lets threads meet as if they were processes.

  Args:
    *calls: of each its id, how many it expects, and its facts.
    on_end: as in `hosts.join`.
    timeout: seconds to wait for all.

  Returns:
    For each its connections, or what it complains about.
  """
  address = f'localhost:{connections.free_port()}'

  def run(process_id, num_processes, facts):
    place = connections.Place(
      address=address, process_id=process_id, num_processes=num_processes
    )
    group = connections.Connections(place, on_end)
    try:
      group.meet(facts, time.monotonic() + timeout)
    except errors.UserError as error:
      return str(error)
    return group

  with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
    return [*threads.map(run, *zip(*calls, strict=True))]


@pytest.mark.parametrize(
  ('calls', 'timeout', 'message'),
  [
    (
      [(0, 2, FACTS), (1, 2, FACTS | {'--seed': 5})],
      10,
      '--seed differs: 0 in process 0, 5 in process 1; all processes need',
    ),
    (
      [(0, 3, FACTS), (1, 3, FACTS), (2, 3, FACTS | {'jax': '0.11.0'})],
      10,
      "jax differs: '0.10.2' in process 0, '0.11.0' in process 2; all",
    ),
    (
      [(0, 3, FACTS), (2, 3, FACTS | {'jax': '0.11.0'}), (1, 3, FACTS)],
      10,
      "jax differs: '0.10.2' in process 0, '0.11.0' in process 2; all",
    ),
    (
      [(0, 3, FACTS), (1, 3, FACTS), (1, 3, FACTS)],
      10,
      'two processes have --process_id=1; each needs its own',
    ),
    (
      [(0, 4, FACTS), (2, 4, FACTS)],
      2,
      'of --num_processes=4 these have not come: 1, 3',
    ),
    ([(1, 2, FACTS)], 0.2, 'process 0 does not answer at --coordinator_addr'),
  ],
)
def test_processes_that_do_not_fit(calls, timeout, message):
  for outcome in meet(*calls, timeout=timeout):
    assert outcome.startswith(message)


def test_values_are_exchanged_and_an_end_reaches_all():
  reasons = queue.SimpleQueue()
  groups = meet(*((i, 3, FACTS) for i in range(3)), on_end=reasons.put)
  with concurrent.futures.ThreadPoolExecutor(3) as threads:
    values = threads.map(lambda i: groups[i].exchange([i, 'a']), range(3))
  assert [*values] == [[[0, 'a'], [1, 'a'], [2, 'a']]] * 3
  groups[2].leave(None)
  groups[1].leave('it hurts')
  # Also the one that is done: JAX's own end waits for all.
  for _ in range(2):
    assert reasons.get(timeout=10) == 'process 1: it hurts'
  for group in groups:
    group.close()


def test_values_of_the_first_come_until_it_leaves():
  groups = meet(*((i, 3, FACTS) for i in range(3)))
  for value in (None, {'a': [1.5]}):
    assert groups[0].from_process_zero(lambda value=value: value) == value
    for group in groups[1:]:
      assert group.from_process_zero(None) == value
  groups[0].leave(None)
  for _ in range(2):
    for group in groups[1:]:
      with pytest.raises(connections.FirstHasLeftError):
        group.from_process_zero(None)
  for group in groups[1:]:
    group.leave(None)
    group.close()
  groups[0].wait_for_others(0.1)  # they never end, as they are in this process
  groups[0].close()


def test_others_that_connect_are_turned_away():
  """Something on the network that is no process of this program."""
  port = connections.free_port()
  place = connections.Place(
    address=f'localhost:{port}', process_id=0, num_processes=2
  )
  first = connections.Connections(place, None)
  thread = threading.Thread(target=first.meet, args=({}, time.monotonic() + 9))
  thread.start()
  for noise in (b'GET / HTTP/1.1\r\n', b'7\n', b'{"process_id": 1}\n'):
    programs.wait_for(lambda noise=noise: is_refused(port, noise))
  place = dataclasses.replace(place, process_id=1)
  second = connections.Connections(place, None)
  second.meet({}, time.monotonic() + 9)
  thread.join()
  for group in (first, second):
    group.leave(None)
  for group in (first, second):
    group.close()


def is_refused(port, noise):
  try:
    with socket.create_connection(('localhost', port)) as connection:
      connection.sendall(noise)
      return connection.recv(1) == b''
  except ConnectionRefusedError:  # not there yet
    return False


def test_the_cluster_says_where_the_processes_are(monkeypatch):
  for name, value in (
    ('JOB_ID', '4711'),
    ('STEP_NODELIST', 'node[3-4]'),
    ('NTASKS', '2'),
    ('PROCID', '1'),
    ('LOCALID', '0'),
  ):
    monkeypatch.setenv(f'SLURM_{name}', value)
  place = hosts.find_place(None, None, None, 1)
  assert (place.process_id, place.num_processes) == (1, 2)
  assert place.address.startswith('node3:')


def test_bad_places_are_refused():
  for place, message in (
    (('h:1', 2, 2), '--process_id=2 must be less than --num_processes=2'),
    (('h', 2, 0), '--coordinator_address=h must be host:port'),
    ((None, None, None), 'this is no cluster that JAX knows'),
  ):
    with pytest.raises(errors.UserError, match=re.escape(message)):
      hosts.find_place(*place, 1)


def test_fingerprints_tell_files_apart(tmp_path):
  file = tmp_path / 'model' / 'weights'
  file.parent.mkdir()
  contents = bytes(300_000), bytes(299_999) + b'1', bytes(300_001)
  found = set()
  for content in contents:
    file.write_bytes(content)
    found |= {hosts.fingerprint(file), hosts.fingerprint(file.parent)}
  assert len(found) == 2 * len(contents)
