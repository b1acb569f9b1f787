"""Prepared outcomes: by hand, and by the program."""

import json

import numpy as np
import programs
import pytest

from experiments.studies import outcome_replay


def test_most_probable_outcomes():
  """Chains of one token, a = 0.5: 1/4 for (0, 1) and (1, 0), then 1/8."""
  found = outcome_replay.most_probable(0.5, 1, 4)
  assert found == {(0, 1), (1, 0), (0, 2), (1, 1)}
  # A good draft prepares for whole chains first.
  assert outcome_replay.most_probable(0.9, 3, 1) == {(3, 0)}
  assert outcome_replay.most_probable(0.9, 3, 2) == {(3, 0), (0, 1)}


def test_replay_by_hand():
  """Rounds of the tokens 0 0 1, 0 0 0, 2 and 0."""
  ranks = [np.array([0, 0, 1, 0, 0, 0, 2]), np.array([0])]
  found = outcome_replay.replay(ranks, 2, frozenset({(2, 0), (0, 1)}))
  assert (found.num_tokens, found.num_rounds, found.num_hits) == (8, 4, 2)
  assert found.acceptance_length == 2
  # Four verifications, and two chains of two forwards after them.
  assert found.seconds(1.0, 0.25, 2) == 4 * 1.0 + 2 * 0.5


@pytest.mark.parametrize('acceptance', [0.5, 0.8])
def test_hits_are_as_probable_as_the_outcomes(acceptance):
  generator = np.random.default_rng(0)
  ranks = [generator.geometric(acceptance, 40_000) - 1]
  prepared = outcome_replay.most_probable(acceptance, 3, 6)
  expected = sum(
    acceptance ** (accepted + 1) * (1 - acceptance) ** rank
    for accepted, rank in prepared
  )
  found = outcome_replay.replay(ranks, 3, prepared)
  assert found.hit_rate == pytest.approx(expected, abs=0.01)


@pytest.mark.ci
def test_program(tmp_path):
  output = programs.output_of(
    'studies.prepared_outcomes',
    '--acceptance=0.7',
    '--width=4',
    '--num_draft_steps=2',
    '--num_requests=1',
    f'--output_dir={tmp_path}',
  )
  row = json.loads((tmp_path / 'rows.jsonl').read_text())
  for name in ('swiftspec', 'ssd'):
    assert 0 < row[f'{name}_hit_rate'] <= 1
    assert 1 < row[f'{name}_acceptance_length'] <= 3
    assert row[f'{name}_speed'] > 0
    assert f'0.7  {name}' in output
  assert 'numbers between 0 and 1' in programs.error_of(
    'studies.prepared_outcomes',
    '--acceptance=1',
    f'--output_dir={tmp_path}/other',
  )
