"""The program that trains drafts: kill -9, and several processes."""

import host_programs
import numpy as np
import programs
import pytest
from distillation_cases import write_data

# A target of few heads, as long rows cost most in attention.
MODEL_CHANGES = {
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 8,
}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  directory = tmp_path_factory.mktemp('distillation') / 'data'
  write_data(directory, feature_layers=(0, 1))
  return directory


@pytest.fixture(scope='module')
def whole(model, data, tmp_path_factory):
  """What a run by one process, from start to end, leaves."""
  directory = tmp_path_factory.mktemp('whole')
  assert programs.run('train_draft', *flags_of(model, data, directory))[0] == 0
  return directory


def flags_of(model, data, output_dir):
  return (
    f'--target={model}',
    f'--data={data}',
    f'--output_dir={output_dir}',
    '--init_layers=0',
    '--output_vocab_size=100',
    '--tokens_per_batch=4096',
    '--num_steps=4',
    '--num_passes=2',
    '--warmup_steps=2',
    '--evaluate_every=2',
    '--reads_features',
  )


def losses_of(output_dir):
  lines = programs.read_lines(output_dir, 'metrics.jsonl')
  lines = [line for line in lines if 'training' in line]
  assert [line['step'] for line in lines] == list(range(1, 5))
  return [line['training']['loss'] for line in lines]


@pytest.mark.ci
def test_a_killed_program_goes_on(model, data, whole, tmp_path):
  """kill -9 in the middle changes no loss."""
  killed = tmp_path / 'killed'
  flags = flags_of(model, data, killed)
  with programs.running('train_draft', *flags):
    programs.wait_for(lambda: (killed / 'checkpoints/2').exists())
  assert not (killed / 'training.png').exists()
  output = programs.output_of('train_draft', *flags)
  assert 'chain_acceptance_length' in output
  assert losses_of(killed) == losses_of(whole)
  assert (killed / 'training.png').exists()


@pytest.mark.ci
def test_several_processes_share_the_batches(model, data, whole, tmp_path):
  """Also one that goes on after its last checkpoint."""
  two = tmp_path / 'two'
  flags = flags_of(model, data, two)
  together = host_programs.Together(
    tmp_path, 'train_draft', *flags, environments=[{}] * 2
  )
  programs.wait_for(lambda: (two / 'checkpoints/2').exists())
  together.kill()
  first, second = host_programs.run(tmp_path, 'train_draft', *flags, count=2)
  assert 'chain_acceptance_length' in first
  assert 'held out' not in second
  np.testing.assert_allclose(losses_of(two), losses_of(whole), rtol=1e-4)
  figures, expected = (
    programs.read_lines(x, 'metrics.jsonl')[-1]['held_out']['all']
    for x in (two, whole)
  )
  np.testing.assert_allclose(figures['kl'], expected['kl'], rtol=1e-4)


@pytest.mark.parametrize(
  'flags', [('--process_id=0',), ('--distributed', '--num_processes=2')]
)
def test_a_process_that_does_not_know_the_others(flags):
  error = programs.error_of(
    'train_draft', '--data=data', '--output_dir=draft', *flags
  )
  assert 'needs --distributed and all of' in error
