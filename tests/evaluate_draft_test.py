"""The evaluation of a draft: its figures, and its files."""

import signal

import numpy as np
import programs
import pytest
from benchmark_report_test import record

import swiftspec_jax as ss
from experiments.measuring import evaluation_report
from swiftspec_jax.checkpoint.drafts import draft as draft_lib

QUESTIONS = ('What is rain?', 'Name a tree.', 'Add 2 and 3.')
TIMES = evaluation_report.StepTimes(
  target={1: 1.0, 5: 1.5, 8: 2.0, 16: 4.0}, draft={1: 0.25, 8: 0.5}, width=8
)


def test_speedup_is_predicted_by_the_formulas():
  """Rounds of 2, 3 and 6 tokens."""
  counts = {'num_rounds': 10, 'num_draft_forwards': 60}
  records = [
    record(
      1,
      'chain4',
      num_rounds=10,
      num_accepted=10,
      drafted_per_position=(10, 10, 10, 5),
      accepted_per_position=(6, 3, 1, 0),
    ),
    record(1, 'tree8', num_accepted=20, **counts),
    record(2, 'tree16', num_accepted=50, task='math', **counts),
  ]
  summary = evaluation_report.summarize(records, TIMES)
  assert summary['num_prompts'] == 2
  assert summary['chain_acceptance_length'] == 2
  np.testing.assert_allclose(
    summary['chain_acceptance_per_position'], [0.6, 0.3, 0.1, 0]
  )
  assert summary['tree_acceptance_length'] == 6
  assert summary['tree_acceptance_length_by_nodes'] == {'8': 3, '16': 6}
  assert summary['draft_forwards_per_round_by_mode'] == {
    'chain4': 4,
    'tree8': 6,
    'tree16': 6,
  }
  speedups = summary['predicted_speedup_by_mode']
  assert summary['predicted_speedup'] == max(speedups.values())
  assert speedups == {
    'chain4': 2 / (1.5 + 4 * 0.25),
    'tree8': 3 / (2 + 6 * 0.5),
    'tree16': 6 / (4 + 6 * 0.5),
    'tree8_async': 3 / 3,
    'tree16_async': 6 / 4,
  }
  assert summary['target_step_seconds_by_size']['16'] == 4
  assert summary['draft_step_seconds'] == 0.5
  assert summary['draft_step_seconds_by_size'] == {'1': 0.25, '8': 0.5}
  math = summary['tasks']['math']
  assert math['chain_acceptance_length'] is None
  assert math['predicted_speedup_by_mode']['tree8'] is None
  assert math['predicted_speedup_by_mode']['tree16'] == 6 / 7
  lines = evaluation_report.table(summary).splitlines()
  assert lines[2].split()[:6] == ['all', '2', '0.60', '0.30', '0.10', '0.00']
  assert lines[4].split()[:6] == ['math', '1', '-', '-', '-', '-']


@pytest.fixture(scope='module')
def flags(model, tmp_path_factory):
  """Of a draft directory: the first of the target's two layers."""
  directory = tmp_path_factory.mktemp('evaluation')
  small = ss.load(model, num_layers=1)
  own = {k: v for k, v in small.params.items() if k != 'embedding'}
  draft_lib.save(directory / 'draft', small.config, own, ss.load(model))
  return (
    f'--target={model}',
    f'--draft={directory / "draft"}',
    f'--prompts={programs.write_prompts(directory, *QUESTIONS)}',
    '--max_new_tokens=24',
    # Trees whose programs compile faster.
    '--tree_prompt_lookup=False',
  )


def check_lines(directory, mode, results):
  lines = [
    line
    for line in programs.read_lines(directory, 'results.jsonl')
    if line['mode'] == mode
  ]
  for line, result in zip(lines, results, strict=True):
    assert tuple(line['token_ids']) == result.token_ids
    assert line['num_accepted'] == result.stats.num_accepted
    assert line['num_rounds'] == result.stats.num_rounds


@pytest.mark.ci
def test_ctrl_c_and_resume(flags, model, tmp_path):
  flags = (*flags, f'--output_dir={tmp_path}')
  path = tmp_path / 'results.jsonl'
  with programs.running('evaluate_draft', *flags) as process:
    # The line of the first result is whole before the second one begins.
    programs.wait_for(lambda: path.exists() and '\n' in path.read_text())
    process.send(signal.SIGINT)
    status, output, _ = process.finish()
  assert status == 130
  assert 'chain4' in output
  num_done = len(programs.read_lines(tmp_path, 'results.jsonl'))
  assert num_done < 9
  output = programs.output_of('evaluate_draft', *flags, '--resume')
  assert 'tree16_async' in output
  lines = programs.read_lines(tmp_path, 'results.jsonl')
  assert len({(line['question_id'], line['mode']) for line in lines}) == 9
  summary = programs.read_summary(tmp_path)
  assert summary['provenance']['num_resumed'] == num_done
  assert summary['provenance']['versions']['jax']
  assert summary['num_prompts'] == 3
  assert set(summary['tasks']) == {'a', 'b'}
  assert set(summary['target_step_seconds_by_size']) == {'1', '5', '8', '16'}
  assert min(summary['predicted_speedup_by_mode'].values()) > 0
  assert (tmp_path / 'acceptance.png').read_bytes().startswith(b'\x89PNG')

  target = ss.load(model)
  draft = ss.load(flags[1].partition('=')[2], draft_of=target)
  options = {'draft': draft, 'max_new_tokens': 24, 'batch_size': 1}
  tree = ss.TreeConfig(num_nodes=16, prompt_lookup=False)
  for mode, way in (
    ('chain4', {'num_speculative_tokens': 4}),
    ('tree16', {'tree': tree}),
  ):
    check_lines(
      tmp_path, mode, ss.generate(target, QUESTIONS, **way, **options)
    )


def test_bad_flags_get_one_line(flags, tmp_path):
  error = programs.error_of(
    'evaluate_draft', *flags, f'--output_dir={tmp_path}', '--num_nodes=4'
  )
  assert '--num_nodes has no meaning here' in error
