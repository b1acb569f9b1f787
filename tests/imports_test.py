"""What `import swiftspec_jax` imports, by names and not by the clock."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import swiftspec_jax as ss

ROOT = pathlib.Path(__file__).parents[1]
# Each takes a large part of a second, and no plain decoding needs it.
LATE = {
  'gguf',
  'jax.experimental.mosaic',
  'jax.experimental.pallas',
  'matplotlib',
  'optax',
  'orbax',
  'scipy',
  'tokenizers',
  'transformers',
}


def imported_by(code):
  """Returns the modules that a new Python has after `code`."""
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      f'import sys, json\n{code}\nprint(json.dumps([*sys.modules]))',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return {*json.loads(done.stdout)}


def test_the_package_alone_imports_nothing_else():
  imported = imported_by('import swiftspec_jax; swiftspec_jax.__version__')
  assert {x for x in imported if x.startswith('swiftspec_jax')} == {
    'swiftspec_jax'
  }
  assert not {'absl', 'jax', 'numpy'} & imported


def test_its_names_import_no_package_before_it_is_used():
  imported = imported_by('from swiftspec_jax import *; load, generate')
  assert 'swiftspec_jax.api.decoding' in imported
  assert not LATE & imported


def test_names_are_those_that_type_checkers_see():
  tree = ast.parse(pathlib.Path(ss.__file__).read_text())
  imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
  seen = {
    alias.name: node.module.removeprefix('swiftspec_jax.')
    for node in imports
    if node.module.startswith('swiftspec_jax')
    for alias in node.names
  }
  assert seen == ss._MODULES
  assert sorted(ss.__all__) == sorted(seen)
  assert {*ss.__all__, '__version__'} <= {*dir(ss)}


def test_other_names_are_refused_as_by_any_module():
  with pytest.raises(AttributeError, match="no attribute 'lod'"):
    ss.lod  # noqa: B018
