"""The program that trains drafts: kill -9, and several processes."""

import json
import signal
import socket

import numpy as np
import programs
import pytest
from distillation_cases import write_data


@pytest.fixture
def data(tmp_path):
  write_data(tmp_path / 'data', feature_layers=(0, 1))
  return tmp_path / 'data'


def flags_of(model, data, output_dir, *options, tokens_per_batch=2048):
  return (
    f'--target={model}',
    f'--data={data}',
    f'--output_dir={output_dir}',
    '--init_layers=0',
    '--output_vocab_size=100',
    f'--tokens_per_batch={tokens_per_batch}',
    '--num_steps=9',
    '--warmup_steps=2',
    '--evaluate_every=3',
    *options,
  )


def read_lines(output_dir):
  path = output_dir / 'metrics.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()]


def losses_of(output_dir):
  lines = [line for line in read_lines(output_dir) if 'training' in line]
  assert [line['step'] for line in lines] == list(range(1, 10))
  return [line['training']['loss'] for line in lines]


@pytest.mark.parametrize('options', [(), ('--reads_features',)])
def test_a_killed_program_goes_on(model, data, tmp_path, options):
  """kill -9 in the middle changes no loss."""
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  flags = flags_of(model, data, whole, *options)
  assert programs.run('train_draft', *flags)[0] == 0
  flags = flags_of(model, data, killed, *options)
  with programs.start('train_draft', *flags) as process:
    programs.wait_for(lambda: (killed / 'checkpoints/3').exists())
    process.send_signal(signal.SIGKILL)
  status, output, _ = programs.run('train_draft', *flags)
  assert status == 0
  assert 'chain_acceptance_length' in output
  assert losses_of(killed) == losses_of(whole)
  assert (killed / 'training.png').exists()


def test_several_processes_share_the_batches(model, data, tmp_path):
  """Also one that goes on behind its last checkpoint."""
  one, two = tmp_path / 'one', tmp_path / 'two'
  sizes = {'tokens_per_batch': 4096}
  flags = flags_of(model, data, one, '--reads_features', **sizes)
  assert programs.run('train_draft', *flags)[0] == 0
  flags = flags_of(model, data, two, '--reads_features', **sizes)

  def start_both():
    with socket.create_server(('localhost', 0)) as server:
      port = server.getsockname()[1]
    return [
      programs.start(
        'train_draft',
        *flags,
        '--distributed',
        f'--coordinator_address=localhost:{port}',
        '--num_processes=2',
        f'--process_id={i}',
      )
      for i in range(2)
    ]

  processes = start_both()
  programs.wait_for(lambda: (two / 'checkpoints/3').exists())
  for process in processes:
    process.kill()
    process.communicate()
  first, second = (programs.finish(process) for process in start_both())
  assert (first[0], second[0]) == (0, 0)
  assert 'chain_acceptance_length' in first[1]
  assert 'held out' not in second[1]
  np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=1e-4)
  figures, expected = (read_lines(x)[-1]['held_out']['all'] for x in (two, one))
  np.testing.assert_allclose(figures['kl'], expected['kl'], rtol=1e-4)


@pytest.mark.parametrize(
  'flags', [('--process_id=0',), ('--distributed', '--num_processes=2')]
)
def test_a_process_that_does_not_know_the_others(flags):
  error = programs.error_of(
    'train_draft', '--data=data', '--output_dir=draft', *flags
  )
  assert 'needs --distributed and all of' in error
