"""The notebooks, from top to bottom, as their readers run them."""

import pathlib

import nbclient
import nbformat
import pytest

from swiftspec_jax.checkpoint import builtin

FOLDER = pathlib.Path(__file__).parents[1] / 'experiments' / 'notebooks'


def read(name):
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


@pytest.fixture
def run(monkeypatch):
  """Function that runs a notebook; returns what it printed and its types."""
  monkeypatch.setenv(
    'JAX_COMPILATION_CACHE_DIR', str(builtin.cache_dir() / 'compiled-tests')
  )
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')

  def execute(name):
    notebook = read(name)
    client = nbclient.NotebookClient(
      notebook, timeout=300, resources={'metadata': {'path': str(FOLDER)}}
    )
    client.execute()
    outputs = [o for cell in notebook.cells for o in cell.get('outputs', ())]
    types = [t for output in outputs for t in output.get('data', {})]
    printed = ''.join(o.text for o in outputs if o.output_type == 'stream')
    assert 'installing' not in printed
    return printed, types

  return execute


@pytest.mark.parametrize(
  'path', sorted(FOLDER.glob('*.ipynb')), ids=lambda path: path.stem
)
def test_notebooks_are_committed_without_outputs(path):
  for cell in read(path.stem).cells:
    if cell.cell_type == 'code':
      assert not cell.outputs
      assert cell.execution_count is None


def test_quickstart(run):
  printed, types = run('swiftspec_quickstart')
  assert {'text/html', 'image/png'} <= set(types)
  for mode in ('autoregressive', 'prompt_lookup', 'serial', 'async'):
    assert printed.count(mode) >= 2
  assert 'async (forced acceptance 0.7)' in printed


def test_load(run):
  printed, types = run('smartspec_load')
  assert types.count('image/png') == 4
  # As in docs/goodput.md.
  assert ' 2305.9   3160.0   3739.8   4000.2   4073.1 ' in printed
  assert 'always_5 is slower than no speculation from' in printed
  assert 'whole steps: predicted times are off by' in printed
  assert printed.count('latency of goodput over that of') >= 4
