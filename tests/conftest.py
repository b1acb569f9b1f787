"""Settings of the whole test run, made before JAX starts."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import pytest

from swiftspec_jax import testing
from swiftspec_jax.checkpoint import builtin

# Sharding tests run on simulated devices.
if jax.config.jax_num_cpu_devices == -1:
  jax.config.update('jax_num_cpu_devices', 8)
# Silent broadcasting and silent promotion hide mistakes.
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
# Compiled programs are kept, so that a second run is quick.
jax.config.update(
  'jax_compilation_cache_dir', str(builtin.cache_dir() / 'compiled-tests')
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


@pytest.fixture(scope='module', autouse=True)
def forget_programs():
  """Drops compiled programs: a process may have 65,530 memory maps only."""
  yield
  jax.clear_caches()


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """The directory of a small model, for programs to load."""
  directory = tmp_path_factory.mktemp('models') / 'tiny'
  testing.write_tiny_checkpoint(directory)
  return directory


@pytest.fixture
def no_races(capfd):
  """The TPU's interpreter prints what it finds."""
  yield
  assert 'RACE DETECTED' not in ''.join(capfd.readouterr())
