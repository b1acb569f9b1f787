"""The demonstration, which is the first thing that people run."""

import programs


def test_demonstration_is_honest_and_ends_with_a_table():
  status, output, complaints = programs.run('demo')
  assert status == 0, complaints
  assert output.count('--- plain decoding (compiling...)') == 3
  table = output[output.index('tokens/s  ') :].splitlines()
  rows = {line.split()[0]: line.split() for line in table[1:6] if line}
  for name in ('question', 'summary', 'code', 'all'):
    plain, speculative, speedup, length, identical, *verdict = rows[name][1:]
    ratio = float(speculative) / float(plain)
    # The numbers are rounded.
    slack = 0.01 + 0.03 * ratio
    assert abs(float(speedup.removesuffix('x')) - ratio) < slack
    assert float(length) >= 1
    assert identical == 'yes'
    assert bool(verdict) == (ratio < 1.05) or abs(ratio - 1.05) < slack
