"""Plans: hand-computed forwards and rounds, the fit, and the program."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import programs
import pytest
from plan_cases import CHIP, DRAFT, PAIR, ROUNDS, TINY

from configs import hardware, launches, models
from configs.llama3_70b_3b_8xh800 import CONFIG as H800
from experiments.planning import plan_report, plan_validation
from swiftspec_jax import errors, testing
from swiftspec_jax.simulator.planning import forward as forward_lib
from swiftspec_jax.simulator.planning import rounds as rounds_lib
from swiftspec_jax.simulator.planning.forward import (
  Efficiency,
  Forward,
  Launches,
)
from swiftspec_jax.simulator.planning.rounds import Times


def test_parts_of_a_forward_can_be_computed_by_hand():
  forward = Forward(
    config=TINY,
    num_chips=2,
    num_tokens=4,
    context=10,
    launches=Launches(layer=7.5, rest=4),
  )
  efficiency = Efficiency(wide=0.5, quantized=0.25)
  chip = dataclasses.replace(CHIP, efficiency=efficiency)
  seconds = forward_lib.predict(forward, chip)
  # Half of the matrices of a layer and of the logits, and all norms (float32).
  matrices = 128 * 8 * 32 + 4 * 32 * 128 + 3 * 128 * 256
  wide = (2 * matrices + 512 * 128) + 5 * 128 * 4
  assert seconds.weights == pytest.approx(wide / 1e6 / 0.5)
  # Keys and values, two layers, ten tokens, one head of 32, two bytes.
  assert seconds.kv == pytest.approx(2 * 2 * 10 * 32 * 2 / 1e6 / 0.5)
  weights = matrices + 256 * 128 + 5 * 128
  assert seconds.compute == pytest.approx(2 * weights * 4 / 1e9)
  # Two in each layer of 4 x 128 numbers, of which each chip sends a half twice.
  assert seconds.all_reduces == pytest.approx(4 * (2e-3 + 4 * 128 * 2 / 1e4))
  assert seconds.launches == pytest.approx((2 * 7.5 + 4) * 1e-4)
  assert seconds.limit == 'weights'
  assert seconds.compute < seconds.weights
  assert seconds.total == pytest.approx(
    seconds.weights + seconds.kv + seconds.all_reduces + seconds.launches
  )
  alone = dataclasses.replace(forward, num_chips=1)
  assert forward_lib.predict(alone, CHIP).all_reduces == 0


@pytest.mark.parametrize('weight_dtype', ['int4', None])
@pytest.mark.parametrize('kernels', [True, False])
def test_kernels_are_those_that_were_counted(weight_dtype, kernels):
  """The counts of both depths come back, and a layer adds up twice."""
  programs = launches.counted(weight_dtype, kernels)
  found = {
    'verify (greedy)': programs.verify,
    'draft grow': programs.grow,
    'draft advance': programs.advance,
  }
  num_rows = 0
  lines = pathlib.Path(launches.__file__).with_name('launches.jsonl')
  for row in map(json.loads, lines.read_text().splitlines()):
    if (row['weight_dtype'], row['kernels']) != (weight_dtype, kernels):
      continue
    num_rows += 1
    own = found[row['step']]
    sums = 0 if row['step'] == 'draft advance' else 2
    counted = row['num_layers'] * (own.layer + sums) + own.rest
    assert counted == pytest.approx(row['num_kernels'])
  assert num_rows == 6


@pytest.mark.parametrize('weight_dtype', [None, 'int8', 'int4', 'float8'])
def test_bytes_are_those_of_the_model(weight_dtype):
  config = dataclasses.replace(
    TINY, weight_dtype=weight_dtype, kernels='reference'
  )
  held = testing.random_model(config, dtype=jnp.bfloat16).num_bytes
  # int8 has a scale for each output, which is left out.
  outputs = 2 * 4 * (8 * 32 + 128 + 2 * 256 + 128)
  scales = outputs if weight_dtype == 'int8' else 0
  assert forward_lib.weights_of(config).held + scales == held


def test_what_does_not_fit_is_refused_with_its_bytes():
  large = Forward(
    config=models.LLAMA_70B,
    num_chips=1,
    num_tokens=8,
    context=500,
    launches=launches.VLLM,
  )
  with pytest.raises(errors.UserError, match=r'141\.\d GB .* the 80 GB of a h'):
    forward_lib.check_fits([large], hardware.get('h800'))
  forward_lib.check_fits([large], hardware.get('b200'))
  with pytest.raises(errors.UserError, match=r"no chip 'h300'.* h800, h100"):
    hardware.get('h300')


def test_constants_are_the_fit():
  """Those in the code, and the errors that the page names."""
  points = plan_validation.points()
  constants = plan_validation.fit([p for p in points if p.is_fitted])
  stored = forward_lib.FITTED
  for found, kept in (
    (constants['launch_seconds'], hardware.get('h800').launch_seconds),
    (constants['efficiency'].wide, stored.wide),
    (constants['efficiency'].quantized, stored.quantized),
  ):
    assert found == pytest.approx(kept, rel=2e-3)
  rows = plan_validation.validate(points)
  fitted = [abs(row['left_out_error']) for row in rows if row['is_fitted']]
  assert len(fitted) == 18
  assert max(fitted) < 0.13
  assert np.mean(fitted) < 0.045


def test_rounds_are_priced():
  """Growth of 2 x 3 s hides a verification of 5 s; one more forward waits."""
  times = Times(target=5.0, draft=3.0, handoff=0.5)
  assert ROUNDS.seconds(times).tolist() == [3 * 6.5 + 3, 2 * 6.5]
  assert ROUNDS.tokens_per_second(times) == 18 / 35.5
  serial = dataclasses.replace(ROUNDS, num_growth_steps=0)
  assert serial.seconds(times).tolist() == [3 * 5.5 + 3, 2 * 5.5]
  assert ROUNDS.acceptance_length == 3.6
  # 12 tokens in 22.5 s and 6 in 13 s; the slowest twentieth of two requests.
  slow, fast = 6 / 13, 12 / 22.5
  slow_speed = ROUNDS.slow_tokens_per_second(times)
  assert slow_speed == pytest.approx(slow + 0.05 * (fast - slow))


def test_interval_covers_both_kinds_of_doubt():
  times, sure = Times(target=5.0, draft=1.0), np.ones(1)
  low, high = rounds_lib.interval(ROUNDS, times, sure, sure)
  assert (low, high) == (6 / 10, 12 / 16)  # one request drawn twice
  wide = rounds_lib.interval(ROUNDS, times, np.array([0.5, 2.0]), sure)
  assert wide[0] < low < high < wide[1]


def test_deployments_are_checked():
  with pytest.raises(errors.UserError, match=r'acceptance must be in \(0, 1'):
    dataclasses.replace(DRAFT, acceptance=1.5)
  with pytest.raises(errors.UserError, match='source must be the origin'):
    dataclasses.replace(DRAFT, source='')
  with pytest.raises(errors.UserError, match='target_chips must be between 1'):
    dataclasses.replace(PAIR, target_chips=(2,))
  with pytest.raises(errors.UserError, match='published must be empty where'):
    dataclasses.replace(H800, weight_dtypes=('int8',))


CONFIG = """
import dataclasses
from configs.qwen2_72b_1b5_8xh800 import CONFIG as _BASE
CONFIG = dataclasses.replace(_BASE, num_nodes=(4,), num_draft_steps=(1, 3),
  weight_dtypes=('int4', None), goal=150.0)
"""


@pytest.mark.ci
def test_program_plans(tmp_path):
  config, directory = tmp_path / 'config.py', tmp_path / 'results'
  config.write_text(CONFIG)
  flags = f'--config={config}', f'--output_dir={directory}'
  output = programs.output_of('plan', '--num_requests=2', *flags)
  rows, validation, search, rounds, needs, constants = (
    programs.read_lines(directory, f'{name}.jsonl')
    for name in ('rows', 'validation', 'search', 'rounds', 'needs', 'constants')
  )
  # Serial and three splits, with stock and with fused kernels.
  assert len(rows) == 8
  # Each with two dtypes of the target and two of the draft.
  assert len(search) == 32
  assert {(r['mode'], r['num_draft_steps']) for r in rounds} == {
    (mode, steps) for mode in ('serial', 'async') for steps in (1, 3)
  }
  for row in rows:
    assert row['low'] <= row['tokens_per_second'] <= row['high']
  assert sorted(r['published'] for r in rows if r['published']) == [200, 274]
  assert any('table 7' in row['source'] for row in validation)
  summary = json.loads((directory / 'summary.json').read_text())
  assert summary['provenance']['git_sha']
  best = summary['best']
  assert (best['mode'], best['weight_dtype']) == ('async', 'int4')
  assert best['draft'] == '1.5B'
  assert best['limit'] == max(best['parts'], key=best['parts'].get)
  assert not needs  # the goal is reached
  assert 'data sheet' in {row['source'] for row in constants}
  config = json.loads((directory / 'config.json').read_text())
  planned = plan_report.flags_of(best)
  assert {name: config['flags'][name] for name in planned} == planned
  assert set(summary['what_if']) > {'twice the memory bandwidth'}
  assert 'above the goal of 150: async ' in output
  page = (directory / 'report.html').read_text()
  assert '<h2>Numbers of the chip</h2>' in page
  assert 'best for throughput: async ' in page


def test_program_refuses_what_is_no_config(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text('CONFIG = 3')
  flags = f'--config={path}', f'--output_dir={tmp_path / "out"}'
  assert 'must set CONFIG to a' in programs.error_of('plan', *flags)
  path.unlink()
  assert 'cannot read' in programs.error_of('plan', *flags)
