"""The programs that measure an engine: its costs, and requests under load."""

import itertools
import json

import engine_cases
import programs
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver
from simulate_load_test import COLUMNS, check_interrupted

from experiments import serve_load
from swiftspec_jax import errors
from swiftspec_jax.cli.flags import cost_flags, engine_flags
from swiftspec_jax.policies.cost_model import measured, storage
from swiftspec_jax.policies.cost_model.measured import Measurement
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets

absl_flags.FLAGS.mark_as_parsed()

# The fewest sizes that the fits of costs need.
SIZES = '--rows=1,2,3', '--query_tokens=9', '--contexts=64', '--max_length=2'
# Where the sizes do not matter: few programs.
OF_TREES = '--rows=2', '--query_tokens=6', '--contexts=64'
ONE_SIZE = *OF_TREES, '--max_length=2'
TWO_ROWS = *ONE_SIZE, '--rows=1,2'
FEW = '--request_rates=50', '--num_requests=6', '--output_tokens=8'


def load(*flags):
  """Runs the program here, where its programs of XLA are compiled once."""
  values = dict(flag.removeprefix('--').split('=', 1) for flag in flags)
  with flagsaver.as_parsed(**values):
    serve_load.main()


def write_prompts(tmp_path):
  """Writes three prompts; returns the flag that names them."""
  texts = (f'{i} and {i}' for i in range(3))
  return f'--prompts={programs.write_prompts(tmp_path, *texts)}'


def of_models(model, mode):
  """Flags of a target that its own first layer drafts for."""
  models = f'--target={model}', f'--draft={model}', '--draft_layers=1'
  return *models, f'--mode={mode}'


@pytest.mark.ci
def test_costs(model, tmp_path):
  """On a busy machine there is an explanation instead of a file."""
  flags, costs = of_models(model, 'chain'), tmp_path / 'costs.json'
  status, output, complaints = programs.run(
    'profile_costs', *flags, *SIZES, '--repeats=9', f'--output={costs}'
  )
  assert costs.exists() == (status == 0)
  if status:
    assert 'measure again on an idle machine' in complaints
    return
  for part in ('plain', 'target', 'draft', 'intake', 'overhead'):
    assert f'\n{part} ' in output
  assert 'whole steps: predicted times are off by' in output
  assert storage.load(costs).key.buckets.rows == (1, 2, 3)


def save_costs(model, path):
  """Costs of the small engine that nobody has measured."""
  buckets = StepBuckets(rows=(1, 2), query_tokens=(6,), lengths=(0, 1, 2))
  key = measured.CostKey(
    target=str(model),
    draft=f'{model} (1 layers)',
    dtype='float32',
    device_kind='cpu',
    num_devices=1,
    buckets=buckets,
  )
  found = [
    Measurement(part=part, num_rows=rows, kv_tokens=kv_tokens, **more)
    for rows, kv_tokens in itertools.product((1, 2), (0, 64))
    for part, more in (
      ('plain', {'seconds': 0.01 + 1e-5 * kv_tokens}),
      ('target', {'num_query_tokens': 6, 'seconds': 0.012}),
      ('draft', {'num_draft_steps': 1, 'seconds': 0.001}),
      ('intake', {'seconds': 0.002}),
      ('overhead', {'num_query_tokens': 6, 'seconds': 0.0005}),
    )
  ]
  storage.save(path, measured.fit(key, found))


def test_load(model, tmp_path, capsys):
  costs, directory = tmp_path / 'costs.json', tmp_path / 'results'
  save_costs(model, costs)
  flags = (
    *of_models(model, 'chain'),
    *TWO_ROWS,
    write_prompts(tmp_path),
    *FEW,
    f'--costs={costs}',
  )
  names = ['none', 'always_2', 'table', 'goodput']
  flags += f'--policies={",".join(names)}', '--virtual_time=true'
  load(*flags, f'--output_dir={directory}')
  rows = programs.read_lines(directory)
  assert [row['policy'] for row in rows] == names
  for row in rows:
    assert tuple(row)[: len(COLUMNS)] == COLUMNS
    assert row['num_requests'] == 6
  assert rows[0]['acceptance_length'] == 1 < rows[1]['acceptance_length']
  for name in ('latency', 'lengths'):
    assert (directory / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  assert 'simulated over measured latency' in capsys.readouterr().out
  lines = programs.read_lines(directory, 'simulated.jsonl')
  assert [line['policy'] for line in lines] == names
  facts = json.loads((directory / 'provenance.json').read_text())
  assert facts['flags']['rows'] == ['1', '2']
  # Costs of other sizes are of no use.
  with pytest.raises(
    errors.UserError,
    match=r'was measured with rows=\(1, 2\), here it is \(2,\)',
  ):
    load(*flags, '--rows=2', f'--output_dir={tmp_path / "other"}')


def test_costs_need_several_sizes(model, tmp_path):
  error = programs.error_of(
    'profile_costs',
    *of_models(model, 'chain'),
    *TWO_ROWS,
    f'--output={tmp_path / "costs.json"}',
  )
  assert '--rows and --contexts make 2 sizes of steps' in error


def test_load_of_living_trees(model, tmp_path):
  load(
    *of_models(model, 'async'),
    *OF_TREES,
    '--num_nodes=3',
    '--num_draft_steps=2',
    write_prompts(tmp_path),
    '--policies=none,fixed_2',
    *FEW,
    f'--output_dir={tmp_path / "results"}',
  )
  none, fixed = programs.read_lines(tmp_path / 'results')
  assert none['acceptance_length'] == 1 < fixed['acceptance_length']


def test_forced_acceptance(model, tmp_path, capsys):
  flags = (
    f'--target={model}',
    *ONE_SIZE,
    write_prompts(tmp_path),
    '--mode=forced',
    '--policies=none,fixed_2',
    *FEW[:2],
    '--output_tokens=16',
    f'--output_dir={tmp_path / "results"}',
  )
  with pytest.raises(errors.UserError, match='needs --forced_acceptance'):
    load(*flags)
  load(*flags, '--forced_acceptance=1')
  assert 'drafts: forced_1' in capsys.readouterr().out
  none, fixed = programs.read_lines(tmp_path / 'results')
  assert none['acceptance_length'] == 1
  assert fixed['acceptance_rate_per_position'] == [1, 1]


def test_runs_learn_nothing_from_each_other(tmp_path):
  """The second run of a policy finds no outputs of the first."""
  engine = engine_cases.make_engine(engine_cases.DRAFTS['suffixes'])
  sizes = engine_cases.make_sizes()
  policies = cost_flags.Policies(engine, engine_cases.TARGET, sizes)
  prompts = [(i, i + 1, i) for i in range(3)]
  rows = []
  with flagsaver.flagsaver(
    mode='suffix_lookup',
    policies=['fixed_2', 'fixed_2'],
    num_requests=5,
    output_tokens=16,
    length_spread=0.0,
  ):
    # All requests come at once.
    serve_load._serve(engine, policies, prompts, [1e6], rows, tmp_path)
  first, second = (row['acceptance_length'] for row in rows)
  assert first == second
  assert [row['num_repeated_prompts'] for row in rows] == [2, 2]
  assert serve_load._repetition(rows).startswith('4 of 10 requests')


def test_interrupted(model, tmp_path):
  check_interrupted(
    tmp_path / 'results',
    'serve_load',
    f'--target={model}',
    *ONE_SIZE,
    write_prompts(tmp_path),
    '--mode=prompt_lookup',
    '--policies=none',
    *FEW,
    '--seeds=1000',
  )


def test_living_trees_have_the_sizes_of_their_flags():
  with flagsaver.flagsaver(
    mode='serial', draft='x', num_nodes=4, query_tokens=['8']
  ):
    assert engine_flags.sizes().scheduler.buckets.lengths == (0, 1, 2, 3)


@pytest.mark.parametrize(
  ('mode', 'name', 'message'),
  [
    ('serial', 'max_length', 'mode serial; give --num_nodes'),
    ('chain', 'run_ahead', 'mode chain; its drafts need'),
    ('async', 'forced_acceptance', 'mode async; leave it out'),
    ('auto', 'max_length', 'mode serial; give --num_nodes'),
  ],
)
def test_flags_that_a_mode_does_not_read(mode, name, message):
  with flagsaver.flagsaver(mode=mode, draft='x'):
    absl_flags.FLAGS[name].present = 1
    with pytest.raises(errors.UserError, match=f'--{name} has no .*{message}'):
      engine_flags.sizes()


def test_mistakes_are_explained(tmp_path):
  directory = f'--output_dir={tmp_path / "results"}'
  error = programs.error_of('serve_load', '--policies=table', directory)
  assert 'table needs --costs' in error
  for flags, message in (
    (
      ('--policies=none', '--virtual_time=true'),
      '--virtual_time needs --costs',
    ),
    (('--rows=1,x',), '--rows=1,x must be numbers'),
    (('--contexts=64,32',), '--contexts=64,32 must be ascending'),
    (('--mode=chain', '--policies=none'), 'needs a draft model'),
  ):
    with pytest.raises(errors.UserError, match=message):
      load(*flags, directory)
  assert not (tmp_path / 'results').exists()
