"""The notebook, from top to bottom, as its readers run it."""

import pathlib

import nbclient
import nbformat
import pytest

from swiftspec_jax.checkpoint import builtin

FOLDER = pathlib.Path(__file__).parents[1] / 'experiments' / 'notebooks'


@pytest.fixture(scope='module')
def notebook():
  path = FOLDER / 'swiftspec_quickstart.ipynb'
  return nbformat.read(path, as_version=4)


def test_notebook_is_committed_without_outputs(notebook):
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      assert not cell.outputs
      assert cell.execution_count is None


def test_notebook_runs(notebook, monkeypatch):
  monkeypatch.setenv(
    'JAX_COMPILATION_CACHE_DIR', str(builtin.cache_dir() / 'compiled-tests')
  )
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
  client = nbclient.NotebookClient(
    notebook, timeout=300, resources={'metadata': {'path': str(FOLDER)}}
  )
  client.execute()
  outputs = [o for cell in notebook.cells for o in cell.get('outputs', ())]
  types = {t for output in outputs for t in output.get('data', {})}
  assert {'text/html', 'image/png'} <= types
  printed = ''.join(o.text for o in outputs if o.output_type == 'stream')
  for mode in ('autoregressive', 'prompt_lookup', 'serial', 'async'):
    assert printed.count(mode) >= 2
  assert 'async (forced acceptance 0.7)' in printed
  assert 'installing' not in printed
