"""Settings of the whole test run, made before JAX starts.

They are in the environment, so that programs that tests start have them too.
"""

import gc
import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tiny models take far longer to compile than to run.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
# Notes of where operations come from take a fifth of the compile time.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# Compiled programs are kept for the other processes and for the next run.
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

import hypothesis
import jax
import pytest

from swiftspec_jax import testing
from swiftspec_jax.checkpoint import builtin

if jax.__version_info__ < (0, 11):
  # XLA's older way to emit fusions compiles faster; newer XLA lacks it. All
  # processors are busy, so that parts of a program gain nothing by threads. The
  # passes that split sums and loops take a fifth of the compile time.
  os.environ.setdefault(
    'XLA_FLAGS',
    '--xla_cpu_use_fusion_emitters=false '
    '--xla_cpu_parallel_codegen_split_count=1 '
    '--xla_disable_hlo_passes='
    'tree_reduction_rewriter,cpu-parallel-task-assigner',
  )
# The first example compiles programs, and no fixture changes between two. Where
# all processors are busy, examples are slow.
hypothesis.settings.register_profile(
  'tests',
  deadline=None,
  suppress_health_check=[
    hypothesis.HealthCheck.function_scoped_fixture,
    hypothesis.HealthCheck.too_slow,
  ],
)
hypothesis.settings.load_profile('tests')
# Sharding tests run on simulated devices.
if jax.config.jax_num_cpu_devices == -1:
  jax.config.update('jax_num_cpu_devices', 8)
# Tracing makes many objects, hardly any in cycles.
gc.set_threshold(200_000)
# Silent broadcasting and silent promotion hide mistakes.
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(
  builtin.cache_dir() / 'compiled-tests'
)
jax.config.update(
  'jax_compilation_cache_dir', os.environ['JAX_COMPILATION_CACHE_DIR']
)
if jax.__version_info__ < (0, 11):
  from jax._src import cache_key

  # What is compiled for one simulated device serves all: without their numbers
  # in the key, as JAX has it for GPUs, it is found in the cache.
  _hash_options = cache_key._hash_serialized_compile_options
  cache_key._hash_serialized_compile_options = (
    lambda hash_object, options, **_: _hash_options(
      hash_object, options, strip_device_assignment=True
    )
  )

# A process takes whole files; with these first none is left alone at the end.
LONGEST = (
  'first_hour_test',
  'notebook_test',
  'demo_test',
  'distillation_test',
  'builtin_draft_test',
  'tree_modes_test',
  'engine_test',
  'feature_draft_test',
  'persistent_trees_test',
  'serve_load_test',
  'decoding_test',
  'quantized_weights_test',
  'benchmark_test',
  'hybrid_tree_test',
  'real_weights_test',
  'serve_hosts_test',
  'draw_tree_test',
  'server_soak_test',
  'server_test',
  'engine_tree_test',
  'simulate_load_test',
  'train_draft_test',
  'verify_test',
)


def pytest_collection_modifyitems(items):
  places = {name: place for place, name in enumerate(LONGEST)}
  items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
  gc.freeze()  # modules and tests are there to stay


# Compiled programs are kept for the modules after theirs, which have many of
# them in common, while they leave room: a process may have 65,530 memory maps.
MOST_MAPS = 30_000


def num_maps():
  try:
    with open('/proc/self/maps') as file:
      return sum(1 for _ in file)
  except FileNotFoundError:  # only Linux has it
    return MOST_MAPS + 1


@pytest.fixture(scope='module', autouse=True)
def few_programs():
  yield
  if num_maps() > MOST_MAPS:
    jax.clear_caches()


@pytest.fixture(scope='module')
def no_programs():
  """Modules that test what a warm-up compiles find nothing of others."""
  jax.clear_caches()


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """For what all tests of a module read."""
  return tmp_path_factory.mktemp('directory')


@pytest.fixture(scope='module')
def model(request, tmp_path_factory):
  """The directory of a small model, for programs to load.

  A module's MODEL_CHANGES, if there are any, are those of its config.json.
  """
  directory = tmp_path_factory.mktemp('models') / 'tiny'
  changes = getattr(request.module, 'MODEL_CHANGES', {})
  testing.write_tiny_checkpoint(directory, **changes)
  return directory


@pytest.fixture
def no_races(capfd):
  """The TPU's interpreter prints what it finds."""
  yield
  assert 'RACE DETECTED' not in ''.join(capfd.readouterr())
