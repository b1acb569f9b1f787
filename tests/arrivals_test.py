"""Arrivals and lengths of requests."""

import json

import numpy as np
import pytest
from scipy import stats

from swiftspec_jax import errors
from swiftspec_jax.simulator import arrivals as arrivals_lib

N = 20_000


def test_poisson_gaps_are_exponential():
  """Item 40."""
  times = arrivals_lib.poisson(4.0, N, seed=0)
  gaps = np.diff(times)
  assert gaps.mean() == pytest.approx(0.25, rel=0.03)
  assert stats.kstest(gaps, 'expon', args=(0, 0.25)).pvalue > 0.01


@pytest.mark.parametrize('pattern', list(arrivals_lib.PATTERNS))
def test_patterns(pattern):
  """Item 40: the rate on average, seeds, the same requests at every rate."""
  draw = arrivals_lib.PATTERNS[pattern]
  times = draw(4.0, N, 0)
  assert (np.diff(times) >= 0).all()
  assert N / times[-1] == pytest.approx(4.0, rel=0.05)
  np.testing.assert_array_equal(times, draw(4.0, N, 0))
  assert not np.array_equal(times, draw(4.0, N, 1))
  if pattern != 'step':
    np.testing.assert_allclose(draw(8.0, N, 0), times / 2)


def test_step_pattern():
  times = arrivals_lib.step(10.0, N, seed=0)
  is_high = times % 40 < 20
  assert is_high.mean() == pytest.approx(0.75, abs=0.02)


def test_burst_pattern():
  times = arrivals_lib.burst(4.0, N, seed=0)
  _, counts = np.unique(times, return_counts=True)
  assert counts.mean() == pytest.approx(16, rel=0.1)


def test_lengths():
  lengths = arrivals_lib.draw_lengths(200, 0.5, N, 0, 'prompt')
  assert lengths.mean() == pytest.approx(200, rel=0.02)
  assert np.log(lengths).std() == pytest.approx(0.5, rel=0.03)
  others = arrivals_lib.draw_lengths(200, 0.5, N, 0, 'output')
  assert abs(np.corrcoef(lengths, others)[0, 1]) < 0.05
  same = arrivals_lib.draw_lengths(7, 0.0, 3, 0, 'prompt')
  assert same.tolist() == [7, 7, 7]
  assert arrivals_lib.draw_lengths(1, 1.0, N, 0, 'prompt').min() == 1


def write(path, rows):
  path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  return path


def test_traces(tmp_path):
  rows = [
    {'arrival': 10, 'prompt_tokens': 5, 'output_tokens': 2, 'user': 'x'},
    {'arrival': 10.5, 'prompt_tokens': 6, 'output_tokens': 3},
    {'arrival': 14, 'prompt_tokens': 7, 'output_tokens': 4},
  ]
  trace = arrivals_lib.read_trace(write(tmp_path / 'trace.jsonl', rows))
  assert trace.times.tolist() == [10, 10.5, 14]
  assert trace.prompt_tokens.tolist() == [5, 6, 7]
  faster = arrivals_lib.scaled(trace, rate=4.0)
  assert faster.times.tolist() == [0, 0.0625, 0.5]


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    ([], 'holds no arrivals'),
    (None, 'cannot read a trace from'),
    ('{', 'line 1: not valid JSON'),
    ([3], 'line 1: must be a JSON object'),
    ([{'arrival': -1}], "'arrival' must be a number of at least 0, got -1"),
    (
      [{'arrival': 1, 'prompt_tokens': 2.5}],
      "'prompt_tokens' must be a whole number of at least 1, got 2.5",
    ),
    (
      [
        {'arrival': 2, 'prompt_tokens': 1, 'output_tokens': 1},
        {'arrival': 1, 'prompt_tokens': 1, 'output_tokens': 1},
      ],
      'must not descend',
    ),
  ],
)
def test_bad_traces_are_refused(rows, message, tmp_path):
  path = tmp_path / 'trace.jsonl'
  if isinstance(rows, str):
    path.write_text(rows)
  elif rows is not None:
    write(path, rows)
  with pytest.raises(errors.UserError, match=message):
    arrivals_lib.read_trace(path)


def test_one_moment_has_no_rate(tmp_path):
  row = {'arrival': 1, 'prompt_tokens': 1, 'output_tokens': 1}
  trace = arrivals_lib.read_trace(write(tmp_path / 'trace.jsonl', [row, row]))
  with pytest.raises(errors.UserError, match='at one moment have no rate'):
    arrivals_lib.scaled(trace, 1.0)
