"""What `doctor` says of a machine."""

import numpy as np
import programs
import pytest

from swiftspec_jax import testing
from swiftspec_jax.cli import doctor


def test_it_says_what_is_there():
  output = programs.output_of('doctor', '--nostep')
  said = dict(line.split(maxsplit=1) for line in output.splitlines())
  assert 'jax ' in said['packages']
  assert 'experiments yes' in said['extras']
  assert '(cpu)' in said['devices']
  assert said['dtype'].startswith('float32')
  assert 'GB free' in said['cache']
  assert said['native'].startswith('compiled for this CPU')
  assert 'share' not in said


def test_a_step_is_timed():
  model = testing.table_model(np.eye(32, dtype=np.float32))
  assert 0 < doctor.step_seconds(model) < 1


@pytest.mark.parametrize(('share', 'word'), [(0.7, 'good'), (0.1, 'low')])
def test_a_low_share_is_worth_a_look(share, word):
  assert doctor.verdict(share).startswith(word)
