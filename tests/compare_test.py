"""Systems side by side: the program, its rows, and what it refuses."""

import programs
import pytest

from experiments.studies import systems

LOAD = ('--request_rates=20', '--num_requests=30', '--settings=load')


def test_load(tmp_path):
  """All systems with a policy serve the same requests."""
  output = programs.output_of('compare', *LOAD, f'--output_dir={tmp_path}')
  rows = {row['system']: row for row in programs.read_lines(tmp_path)}
  assert set(rows) == {
    name for name, system in systems.SYSTEMS.items() if system.policy
  }
  for name, row in rows.items():
    assert row['setting'] == 'load at 20/s, simulated'
    assert (row['acceptance_length'] > 1) == (name != systems.PLAIN)
    assert f'\n20    {name}' in output


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--systems=tree,eagle',), "unknown name 'eagle'"),
    (('--systems=su', '--settings=prompts'), 'none of su takes part'),
  ],
)
def test_bad_flags(tmp_path, flags, message):
  found = programs.error_of('compare', *flags, f'--output_dir={tmp_path}')
  assert message in found


def test_every_system_takes_part_in_something():
  for name, system in systems.SYSTEMS.items():
    assert system.decodes or system.policy, name
