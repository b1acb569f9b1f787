"""Tiles that are measured, kept in files, and taken by kernels."""

import dataclasses
import functools
import json
import logging

import jax
import jax.numpy as jnp
import programs
import pytest
from kernel_calls import API_CALLS

import swiftspec_jax as ss
from experiments.kernels import tune
from experiments.kernels.kernel_cases import KERNELS, Case
from kernels_pallas import registry, tuning
from kernels_pallas.swiglu import pallas_gpu as swiglu_gpu
from kernels_pallas.thresholds import arg_specs, pallas_gpu

FAST = pallas_gpu.Config(block_vocab=4096)
SLOW = pallas_gpu.Config(block_vocab=64)
SPEC = arg_specs.ArgSpec(
  name='tiny', num_tokens=1, vocab_size=200, batch_size=1
)
CASE = Case(kernel='find_thresholds', spec=SPEC)
ENTRY = tuning.Entry(
  kernel='find_thresholds',
  implementation='pallas_gpu',
  device_kind='cpu',
  shapes='float32[1, 1, 200], int32[1], float32[1]',
  config=FAST,
  seconds=1.0,
  default_seconds=2.0,
)


def write(path, **changes):
  """Writes one entry with changes to a file."""
  row = dataclasses.asdict(ENTRY) | changes
  path.write_text(json.dumps([row]))


def test_the_best_tiles_are_kept():
  def call(logits, top_ks, top_ps, config=SLOW):
    # The smaller its tiles, the more this one works.
    def work(_, logits):
      return jnp.where(logits > 1e9, -logits, logits)

    rounds = 4_000_000 // config.block_vocab
    return jax.lax.fori_loop(0, rounds, work, logits)

  entry = tune.tune(CASE, 'pallas_gpu', call, [SLOW, FAST], repeats=2)
  assert entry.config == FAST
  assert entry.key == ENTRY.key
  assert entry.seconds < entry.default_seconds


def test_other_results_and_refusals_are_not_kept():
  def call(logits, top_ks, top_ps, config=None):
    if config == SLOW:
      raise NotImplementedError('too large')
    return logits if config is None else -logits

  assert not tune.tune(CASE, 'pallas_gpu', call, [SLOW, FAST], 1)


def test_kernels_take_what_was_measured(tmp_path, monkeypatch):
  path = tmp_path / 'tiles.json'
  path.write_text(tuning.dump([ENTRY]))
  assert tuning.read(path) == [ENTRY]
  monkeypatch.setenv(tuning.VARIABLE, str(path))

  def config_of(kernel, vocab_size):
    arrays = (jnp.zeros((1, 1, vocab_size)), jnp.zeros(1, int), jnp.zeros(1))
    return tuning.tuned(kernel, 'pallas_gpu', lambda *_, config=None: config)(
      *arrays
    )

  assert config_of('find_thresholds', 200) == FAST
  assert config_of('find_thresholds', 201) is None
  assert config_of('verify_tree', 200) is None
  monkeypatch.delenv(tuning.VARIABLE)
  assert config_of('find_thresholds', 200) is None


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'config': {'block': 1}}, "entry 0: .* unexpected keyword .* 'block'"),
    ({'config': {'num_bits': 3}}, 'entry 0: num_bits=3 must be a power of two'),
    ({'config': {'num_bits': 16}}, 'entry 0: num_bits=16 must be 8 at most'),
    ({'kernel': 'fft'}, "there are no tiles of pallas_gpu for 'fft'"),
    ({'size': 1}, 'entry 0 must have exactly kernel, implementation'),
  ],
)
def test_bad_entries_are_named(changes, message, tmp_path, monkeypatch, model):
  path = tmp_path / 'tiles.json'
  write(path, **changes)
  monkeypatch.setenv(tuning.VARIABLE, str(path))
  with pytest.raises(ss.UserError, match=message):
    ss.load(model)


def test_a_missing_file_is_named(monkeypatch, model):
  monkeypatch.setenv(tuning.VARIABLE, '/no/such')
  with pytest.raises(ss.UserError, match='SWIFTSPEC_TILES=/no/such cannot be'):
    ss.load(model)


def test_tiles_that_do_not_fit_the_shape_are_refused():
  arrays = jnp.zeros((2, 48)), jnp.zeros((48, 2, 64))
  config = swiglu_gpu.Config(block_rows=32)
  with pytest.raises(ValueError, match='32 rows of a block do not divide 48'):
    swiglu_gpu.swiglu(*arrays, activation='silu', config=config, interpret=True)


@pytest.mark.parametrize(
  'kernel', [kernel for kernel in KERNELS if kernel != 'few_rows']
)
def test_shapes_of_specs_are_those_of_calls(
  kernel, tmp_path, monkeypatch, caplog
):
  """Traced for a GPU; nothing runs."""
  spec = KERNELS[kernel][0][0]
  config = next(tune.candidates(kernel, 'pallas_gpu'))
  path = tmp_path / 'tiles.json'
  shapes, tiles = tuning.shapes_of(spec.arrays()), dataclasses.asdict(config)
  write(path, kernel=kernel, shapes=shapes, config=tiles)
  monkeypatch.setenv(tuning.VARIABLE, str(path))
  call = functools.partial(
    API_CALLS[kernel], implementation='pallas_gpu', **spec.options()
  )
  absl_logger = logging.getLogger('absl')
  monkeypatch.setattr(absl_logger, 'propagate', True)
  with caplog.at_level(logging.INFO, 'absl'):
    jax.eval_shape(call, *spec.arrays())
  assert str(config) in caplog.text


def test_equal_shapes_are_counted():
  arrays = ([jnp.zeros((2, 3))] * 4, jnp.zeros(1, jnp.int32), None)
  assert tuning.shapes_of(arrays) == '4 x float32[2, 3], int32[1]'


@pytest.mark.parametrize(
  ('kernel', 'implementation'),
  [
    (kernel, implementation)
    for kernel in KERNELS
    for implementation in registry.implementations(kernel)
    if implementation not in ('mosaic_gpu', 'native')
  ],
)
def test_there_are_tiles_to_try(kernel, implementation):
  configs = list(tune.candidates(kernel, implementation))
  assert len(configs) == len(set(configs)) > 1


def test_cpus_are_refused():
  complaint = programs.error_of('kernels', 'tune', '--kernel=swiglu')
  assert 'kernels for a cpu have no tiles' in complaint
