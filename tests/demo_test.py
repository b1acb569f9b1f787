"""The demonstration, which is the first thing that people run."""

import programs
import pytest

_WAYS = ('plain decoding', 'prompt lookup', 'auto')
_ROUNDING = 0.01


@pytest.mark.ci
def test_demonstration_is_honest_and_ends_with_a_table():
  status, output, complaints = programs.run('demo')
  assert status == 0, complaints
  table = output[output.index('tokens/s  ') :].splitlines()
  totals = []
  for way, row in zip(_WAYS, table[1:4], strict=True):
    assert output.count(f'--- {way} (compiling...)') == 3
    assert row.startswith(way)
    *speeds, speedup, length, identical = row.removeprefix(way).split()[:7]
    *each, total = map(float, speeds)
    assert min(each) <= total <= max(each)
    totals.append(total)
    ratio = total / totals[0]
    assert abs(float(speedup.removesuffix('x')) - ratio) < _ROUNDING * 3
    assert float(length) >= 1
    assert identical == 'yes'
    has_verdict = row.endswith(('does not pay here', 'makes no difference'))
    should = way != 'plain decoding' and ratio < 1.05
    assert has_verdict == should or abs(ratio - 1.05) < _ROUNDING
