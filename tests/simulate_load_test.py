"""The program that simulates load, and its report."""

import json
import pathlib
import re
import signal

import programs
import pytest
import serving_cases as cases

from experiments.flags import load_flags
from experiments.load import load_plot, load_report
from swiftspec_jax import errors, policies
from swiftspec_jax.cli.flags import policy_names
from swiftspec_jax.policies import loading
from swiftspec_jax.policies.batch_table import BatchTable

ROOT = pathlib.Path(__file__).parents[1]
# The first columns of rows.jsonl, in this order.
COLUMNS = (
  'policy',
  'request_rate',
  'num_requests',
  'mean_e2e_latency',
  'p99_e2e_latency',
  'mean_ttft',
  'mean_tpot',
  'throughput',
  'acceptance_length',
  'mean_num_speculative_tokens',
)
SMALL = ('--num_requests=20', '--request_rates=5,50')


def row(policy, rate, latency, seed=0):
  return {
    'policy': policy,
    'request_rate': rate,
    'num_requests': 3,
    'mean_e2e_latency': latency,
    'p99_e2e_latency': latency * 2,
    'mean_ttft': 0.25,
    'mean_tpot': None,
    'throughput': 10.0,
    'acceptance_length': 2.0,
    'mean_num_speculative_tokens': 1.5,
    'seed': seed,
  }


ROWS = [
  row('none', 1.0, 3.0),
  row('none', 1.0, 5.0, seed=1),
  row('fixed_3', 1.0, 2.0),
  row('goodput', 1.0, 2.2),
  row('none', 9.0, 6.0),
  row('fixed_3', 9.0, 7.0),
  row('goodput', 9.0, 5.7),
]


def test_rows_are_averaged_over_seeds():
  averages = load_report.average(ROWS)
  assert len(averages) == 6
  assert averages[0]['mean_e2e_latency'] == 4.0
  assert 'mean_tpot' not in averages[0]
  table = load_report.table(averages).splitlines()
  assert re.match(
    r'1 +none +4000.0 +8000.0 +250.0 +- +10 +2.00 +1.50 +-', table[2]
  )


def test_comparison():
  assert load_report.compare(load_report.average(ROWS)) == [
    'fixed_3 is slower than no speculation from 9 requests/s',
    'latency of goodput over that of the best fixed length: at most 1.10 (at 1 '
    'requests/s)',
    'latency of goodput over that of no speculation: at most 0.95 (at 9 '
    'requests/s)',
    'latency of no speculation over that of goodput: up to 1.82 (at 1 '
    'requests/s; the paper reports up to 3.2)',
  ]
  assert load_report.compare(load_report.average(ROWS[2:3])) == []
  # With other policies, too.
  rows = [*ROWS, row('table', 1.0, 2.0), row('table', 9.0, 6.0)]
  expected = (
    'latency of goodput over that of table: at most 1.10 (at 1 requests/s)'
  )
  assert expected in load_report.compare(load_report.average(rows))


def test_pictures():
  pictures = load_plot.draw(load_report.average(ROWS), 'title')
  assert all(p.startswith(b'\x89PNG') for p in pictures.values())
  assert set(load_plot.draw([], 'title').values()) == {None}


def test_program(tmp_path):
  output = programs.output_of(
    'simulate_load', *SMALL, '--seeds=2', f'--output_dir={tmp_path}'
  )
  rows = programs.read_lines(tmp_path)
  assert len(rows) == 2 * 2 * 6
  for values in rows:
    assert 0 < values['padded_share'] < 0.5
    assert tuple(values)[: len(COLUMNS)] == COLUMNS
    assert values['num_requests'] == 20
    assert all(values[name] is not None for name in COLUMNS)
  for name in ('latency', 'lengths'):
    assert (tmp_path / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  facts = json.loads((tmp_path / 'provenance.json').read_text())
  assert facts['flags']['profile'] == 'llama-8b-h100'
  assert facts['flags']['num_requests'] == 20
  num_steps = sum(values['num_steps'] for values in rows)
  lines = programs.read_lines(tmp_path, 'steps.jsonl')
  assert sum(n for line in lines for _, _, n in line['shapes']) == num_steps
  assert 'simulated 480 requests in' in output
  assert 'latency of goodput over that of the best fixed length' in output


def test_options(tmp_path):
  trace = tmp_path / 'trace.jsonl'
  trace.write_text(
    ''.join(
      f'{{"arrival": {i}, "prompt_tokens": 30, "output_tokens": 9}}\n'
      for i in range(20)
    )
  )
  for number, flags in enumerate(
    (
      ('--profile=llama-70b-h100', '--coverage=0.5', '--arrivals=burst'),
      ('--tree_sizes=3,7', '--policies=none,fixed_3,table,goodput'),
      ('--acceptance=0.8,0.6', '--sharpness=2', '--acceptance_spread=0.1'),
      (f'--trace={trace}', '--policies=goodput'),
    )
  ):
    directory = tmp_path / str(number)
    programs.output_of(
      'simulate_load', *SMALL, *flags, f'--output_dir={directory}'
    )
    assert programs.read_lines(directory)


def check_interrupted(directory, program, *flags):
  """Ctrl-C after the first row leaves what is done."""
  rows, flag = directory / 'rows.jsonl', f'--output_dir={directory}'
  with programs.running(program, *flags, flag) as process:
    programs.wait_for(lambda: rows.exists() and rows.read_bytes())
    process.send(signal.SIGINT)
    status, output, _ = process.finish()
  assert status == 130
  assert 'written to' in output
  assert (directory / 'latency.png').exists()


def test_interrupted(tmp_path):
  flags = '--num_requests=200', '--seeds=50'
  check_interrupted(tmp_path, 'simulate_load', *flags)
  assert len(programs.read_lines(tmp_path)) < 900


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--policies=none,best', "unknown policy 'best'"),
    ('--acceptance=1.5', '--acceptance: 1.5 is more than 1'),
    ('--kv_tokens=64', 'tokens of context and cache'),
  ],
)
def test_mistakes_are_explained(flag, message, tmp_path):
  error = programs.error_of('simulate_load', flag, f'--output_dir={tmp_path}')
  assert message in error


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('fixed_9', r'fixed_9 is none of the declared lengths \(0, 1, 2\)'),
    ('fixed_', "unknown policy 'fixed_'"),
    ('always_9', r'always_9 is none of the declared lengths \(0, 1, 2\)'),
    ('always_', "unknown policy 'always_'"),
    ('missing_module:Policy', 'cannot import missing_module'),
  ],
)
def test_unknown_policies_are_refused(name, message):
  buckets = cases.unpadded(2, max_length=2)
  table = BatchTable({1: 1})
  with pytest.raises(errors.UserError, match=message):
    policy_names.make(name, buckets, costs=cases.EAGLE_8B, table=table)


@pytest.mark.parametrize('value', ['-2', '0', 'x', 'nan', 'inf'])
def test_rates_are_positive(value):
  message = f"--request_rates: '{value}' must be a positive number"
  with pytest.raises(errors.UserError, match=message):
    load_flags.positive_numbers('request_rates', ['1', value])


def test_documented_policy(tmp_path, monkeypatch):
  text = (ROOT / 'docs' / 'how_to' / 'add_a_policy.md').read_text()
  code = re.search('```python\n# own_policy.py\n(.*?)```', text, re.DOTALL)[1]
  assert len(code.splitlines()) < 40
  (tmp_path / 'own_policy.py').write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  policy = loading.load('own_policy:WhileIdle', cases.EAGLE_8B)
  buckets = cases.unpadded(3)
  view = cases.make_view(3, buckets, limits=[7, 7, 1])
  plan = policy.plan_draft(view)
  assert plan.lengths.tolist() == [2, 2, 1]
  drafts = policies.Drafts(lengths=plan.lengths)
  assert policy.plan_verify(view, plan, drafts).tolist() == [2, 2, 1]
