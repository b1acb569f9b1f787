"""The demonstration, which is the first thing that people run."""

import re

import programs
import pytest

_WAYS = ('plain', 'auto')
_ROUNDING = 0.01


@pytest.mark.optimised
def test_demonstration_is_honest_and_ends_with_a_table():
  output = programs.output_of('demo')
  _, found = re.split(r'tokens a second *\n', output)
  table, rest = found.split('Speculation ')
  _, _, *rows = [row for row in table.splitlines() if row.strip()]
  totals = []
  for way, row in zip(_WAYS, rows, strict=True):
    assert row.strip().startswith(way)
    numbers = row.strip().removeprefix(way).split()
    *speeds, speedup, length, identical = numbers
    *each, total = map(float, speeds)
    assert len(each) == output.count('by then') == 4
    assert min(each) <= total <= max(each)
    totals.append(total)
    ratio = total / totals[0]
    assert abs(float(speedup.removesuffix('x')) - ratio) < _ROUNDING * 3
    assert float(length) >= 1
    assert identical == 'yes'
  assert rest.startswith(('was faster', 'was slower', 'made no difference'))
  assert 'What to try next' in rest
