"""The notebooks, from top to bottom, as their readers run them, but smaller."""

import pathlib

import nbclient
import nbformat
import pytest

from swiftspec_jax import testing

FOLDER = pathlib.Path(__file__).parents[1] / 'experiments' / 'notebooks'


def read(name):
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def run(name, changes):
  """Runs a notebook with changes; returns what it printed and its types."""
  notebook = read(name)
  for old, new in changes.items():
    (cell,) = (cell for cell in notebook.cells if old in cell.source)
    cell.source = cell.source.replace(old, new)
  client = nbclient.NotebookClient(
    notebook, timeout=300, resources={'metadata': {'path': str(FOLDER)}}
  )
  client.execute()
  outputs = [o for cell in notebook.cells for o in cell.get('outputs', ())]
  types = [t for output in outputs for t in output.get('data', {})]
  printed = ''.join(o.text for o in outputs if o.output_type == 'stream')
  assert 'installing' not in printed
  return printed, types


@pytest.mark.parametrize(
  'path', sorted(FOLDER.glob('*.ipynb')), ids=lambda path: path.stem
)
def test_notebooks_are_committed_without_outputs(path):
  for cell in read(path.stem).cells:
    if cell.cell_type == 'code':
      assert not cell.outputs
      assert cell.execution_count is None


@pytest.mark.ci
def test_quickstart():
  changes = {
    'devices=[target_device])': 'devices=[target_device], num_layers=12)',
    'max_new_tokens = 16': 'max_new_tokens = 8',
  }
  printed, types = run('swiftspec_quickstart', changes)
  assert {'text/html', 'image/png'} <= set(types)
  for mode in ('autoregressive', 'prompt_lookup', 'serial', 'async'):
    assert printed.count(mode) >= 2
  assert 'async (forced acceptance 0.7)' in printed


@pytest.mark.ci
def test_load():
  changes = {
    '(5, 20, 80, 160, 320)': '(80, 320)',
    '--repeats=25': '--repeats=5',
    '--num_requests=20': '--num_requests=10',
    # Arrivals are in real time.
    '--request_rates=5,20': '--request_rates=20,40',
  }
  printed, types = run('smartspec_load', changes)
  assert types.count('image/png') == 4
  # As in docs/how_it_works/goodput.md.
  assert ' 2305.9   3160.0   3739.8   4000.2   4073.1 ' in printed
  assert 'always_5 is slower than no speculation from' in printed
  assert 'whole steps: predicted times are off by' in printed
  assert printed.count('latency of goodput over that of') >= 4


@pytest.mark.ci
def test_train(tmp_path):
  testing.write_tiny_checkpoint(tmp_path)
  changes = {
    "'smollm2-135m-instruct'": repr(str(tmp_path)),
    '=2,15,27': '=0,1',
    '=8192': '=100',
    '--warmup_steps=10': '--warmup_steps=2',
    '--num_steps=60': '--num_steps=4',
    '--evaluate_every=30': '--evaluate_every=2',
  }
  printed, types = run('train_a_draft', changes)
  assert types.count('image/png') == 1
  assert 'before the first step: agreement' in printed
  assert 'step 4: held out agreement' in printed
  assert '47 rounds plainly' in printed


@pytest.mark.ci
def test_plan():
  changes = {
    'num_draft_steps=(2, 4, 6, 8)': 'num_draft_steps=(3,)',
    '--num_requests=8': '--num_requests=2',
    'in (0.6, 0.9)': 'in (0.6,)',
  }
  printed, types = run('plan_eight_chips', changes)
  assert types.count('image/png') == 2
  assert 'best for throughput: async ' in printed
  assert ' async, acceptance 0.6:' in printed
