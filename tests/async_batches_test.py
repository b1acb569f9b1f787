"""The study of who waits for a row that missed."""

import numpy as np
import programs
import pytest

from experiments.studies import async_batches_report
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.planning.rounds import Times


def record(accepted, num_forwards, outcomes=(0, 0, 0)):
  return StepRecord(
    lengths=np.full(len(accepted), 3),
    num_levels=np.full(len(accepted), 3),
    num_accepted=np.array(accepted, int),
    time=0.0,
    seconds=1.0,
    host_seconds=0.1,
    draft_plan=None,
    takes_in=False,
    step=None,
    num_devices=1,
    ended=np.zeros(0, int),
    outcomes=np.array(outcomes),
    num_forwards=num_forwards,
  )


@pytest.mark.parametrize(('num_growth_steps', 'step'), [(0, 4), (5, 5)])
def test_rounds_are_priced(num_growth_steps, step):
  """Two rows, then one, then what was on its way when both had ended."""
  figures = async_batches_report.summarize(
    [record([2, 0], 3, (1, 0, 1)), record([1], 0, (0, 1, 1)), record([], 2)],
    Times(target=4.0, draft=1.0),
    num_growth_steps=num_growth_steps,
  )
  first, second = step + 3, step
  assert figures == {
    'tokens_per_second': 6 / (first + second),
    'tpot': (2 * first + second) / 6,
    'acceptance_length': 2.0,
    'hit_rate': 0.5,
    'forwards_waited': 1.5,
    'num_rounds': 2,
  }


def test_program_compares_who_waits(tmp_path):
  output = programs.output_of(
    'async_batches',
    '--limit=3',
    f'--output_dir={tmp_path / "results"}',
    '--max_new_tokens=6',
    '--batch_size=2',
    '--forced_acceptance=0.8',
    '--num_nodes=4',
    '--width=2',
    '--num_draft_steps=1',
    '--tree_prompt_lookup=False',
  )
  rows = programs.read_lines(tmp_path / 'results')
  assert [row['variant'] for row in rows] == list(async_batches_report.VARIANTS)
  assert all(row['tpot'] > 0 for row in rows)
  chips = [row['target_chips'] for row in rows]
  assert chips[0] == 8 > chips[1]
  assert 'async, root alone' in output
  picture = (tmp_path / 'results' / 'async_batches.png').read_bytes()
  assert picture.startswith(b'\x89PNG')
