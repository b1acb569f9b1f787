"""The figures of a benchmark, its order and its files, without a model."""

import dataclasses
import json

import pytest

from experiments.measuring import (
  benchmark_plot,
  benchmark_report,
  benchmark_run,
)
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax.cli.prompts import Prompt


def record(question_id, mode, *, repeat=0, token_ids=(1, 2), **changes):
  values = {
    'question_id': question_id,
    'task': 'qa',
    'mode': mode,
    'repeat': repeat,
    'prompt_tokens': 5,
    'token_ids': token_ids,
    'new_tokens': len(token_ids),
    'ttft_seconds': 0.1,
    'decode_seconds': 1.0,
    'num_rounds': 1,
    'num_drafted': 0,
    'num_accepted': 0,
    'drafted_per_position': (1,),
    'accepted_per_position': (0,),
    'acceptance_length': 1.0,
    'num_hits': 0,
    'num_late_hits': 0,
    'num_misses': 0,
    'num_draft_forwards': 0,
    'finish_reason': 'length',
  }
  return benchmark_output.Record(**{**values, **changes})


def summarize(records, *modes):
  return benchmark_report.summarize(records, modes, is_greedy=True)


def test_modes_are_compared_on_what_both_have_measured():
  records = [
    record(1, 'autoregressive', decode_seconds=2.0),
    record(2, 'autoregressive', decode_seconds=100.0),
    record(1, 'chain', decode_seconds=1.0, num_rounds=1, num_accepted=1),
    record(3, 'chain', decode_seconds=3.0, num_rounds=3, num_accepted=0),
  ]
  summary = summarize(records, 'autoregressive', 'prompt_lookup', 'chain')
  assert list(summary) == ['autoregressive', 'chain']
  chain = summary['chain']
  assert chain['tokens_per_second'] == 1.0
  assert chain['speedup'] == 2.0
  assert chain['acceptance_length'] == 1.25
  assert chain['num_prompts'] == 2
  assert chain['num_outputs_equal'] == 1


def test_peers_with_other_weights_are_not_compared():
  records = [
    record(1, 'autoregressive', decode_seconds=2.0),
    record(1, 'llama_cpp', token_ids=(8, 9)),
  ]
  summary = summarize(records, 'autoregressive', 'llama_cpp')
  assert summary['llama_cpp']['speedup'] == 2.0
  assert summary['llama_cpp']['outputs_equal'] is None
  assert summary['llama_cpp']['tasks']['qa']['outputs_equal'] is None
  assert benchmark_report.describe_differences(records) == []


def test_differences_are_found():
  records = [
    record(1, 'autoregressive', token_ids=(1, 2, 3)),
    record(2, 'autoregressive'),
    record(2, 'autoregressive', repeat=1),
    record(1, 'chain', token_ids=(1, 2)),
    record(2, 'chain'),
    record(2, 'chain', repeat=1, token_ids=(7, 2)),
  ]
  assert benchmark_report.describe_differences(records) == [
    'chain: the output for 1 differs from autoregressive at token 2',
    'chain: the output for 2 differs from autoregressive at token 0',
  ]
  summary = summarize(records, 'autoregressive', 'chain')
  assert summary['autoregressive']['outputs_equal'] is True
  assert summary['chain']['outputs_equal'] is False
  assert summary['chain']['num_outputs_equal'] == 0


def test_rates_of_trees():
  records = [
    record(1, 'async', num_hits=6, num_late_hits=1, num_rounds=9),
    record(2, 'async', num_hits=1, num_misses=2, num_rounds=3),
    record(1, 'chain'),
  ]
  records = [dataclasses.replace(r, host_seconds=0.006) for r in records]
  summary = summarize(records, 'async', 'chain')
  assert summary['async']['hit_rate'] == 0.7
  assert summary['async']['late_hit_rate'] == 0.1
  assert summary['async']['miss_rate'] == 0.2
  assert summary['async']['host_seconds_per_round'] == 0.001
  assert summary['chain']['hit_rate'] is None
  assert '0.70/0.10/0.20' in benchmark_report.table(summary)
  assert benchmark_report.forced_label(summary) == ''
  forced = [dataclasses.replace(r, forced_acceptance=0.7) for r in records[:2]]
  summary = summarize(forced, 'async')
  label = 'forced acceptance 0.7 in async'
  assert benchmark_report.forced_label(summary) == label
  assert 'async (forced acceptance 0.7)' in benchmark_report.table(summary)


def test_plan_takes_all_modes_of_a_prompt_together():
  prompts = [
    (Prompt(question_id=i, task='qa', turns=('a',)), (i,)) for i in range(2)
  ]
  jobs = benchmark_run.plan(prompts, 'xyz', 2)
  found = [''.join(job.mode for job in jobs[i : i + 3]) for i in (0, 3, 6, 9)]
  assert found == ['xyz', 'yzx', 'yzx', 'zxy']
  assert [job.repeat for job in jobs[::3]] == [0, 0, 1, 1]
  assert [job.token_ids for job in jobs[::3]] == [(0,), (1,), (0,), (1,)]


def test_picture_of_more_modes_than_colors():
  names = [f'mode {i}' for i in range(20)]
  summary = summarize([record(1, name) for name in names], *names)
  assert benchmark_plot.draw(summary, 'title').startswith(b'\x89PNG')


def test_picture_of_a_single_mode_without_figures():
  summary = summarize([record(1, 'chain', decode_seconds=0.0)], 'chain')
  assert summary['chain']['tokens_per_second'] is None
  assert benchmark_plot.draw(summary, 'title').startswith(b'\x89PNG')
  assert 'chain' in benchmark_report.table(summary)


def test_damaged_results_are_refused(tmp_path):
  settings = {'mode': 'x'}
  benchmark_output.write_settings(tmp_path, settings)
  benchmark_output.append(tmp_path, record(1, 'chain'))
  assert benchmark_output.open_directory(tmp_path, settings, resume=True) == [
    record(1, 'chain')
  ]
  line = json.dumps(dataclasses.asdict(record(2, 'chain')))
  with (tmp_path / 'results.jsonl').open('a') as file:
    file.write(f'{line[:40]}\n{line}\n')
  with pytest.raises(errors.UserError, match='line 2: not a result'):
    benchmark_output.open_directory(tmp_path, settings, resume=True)


def test_resume_needs_a_benchmark(tmp_path):
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(errors.UserError, match='holds no benchmark'):
    benchmark_output.open_directory(tmp_path, {}, resume=True)
