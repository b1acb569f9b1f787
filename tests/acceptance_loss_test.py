"""Acceptance in asynchronous mode over that in serial mode, by hand."""

import dataclasses
import json

import ablation_test
import numpy as np
import pytest

from experiments.studies import acceptance_loss


def record(name, question_id, task, num_accepted, num_rounds):
  return dataclasses.replace(
    ablation_test.record(name, 0, 1.0),
    question_id=question_id,
    task=task,
    num_accepted=num_accepted,
    num_rounds=num_rounds,
  )


def both(question_id, task, serial, asynchronous):
  return [
    record('serial', question_id, task, *serial),
    record('async', question_id, task, *asynchronous),
  ]


NAMES = ['serial', 'async', 'serial_width_4']


def test_ratios_are_those_of_sums():
  """Two tasks: lengths 3 to 2, and 1.5 to 1.5; all 23 / 10 to 25 / 14."""
  records = [
    *both(1, 'qa', (8, 4), (6, 6)),
    *both(2, 'rag', (2, 4), (2, 4)),
    *both(3, 'qa', (4, 2), (4, 4)),
    record('serial', 4, 'qa', 100, 1),  # async has not measured it
    record('serial_width_4', 1, 'qa', 9, 9),
  ]
  total, qa, rag = acceptance_loss.make_rows(NAMES, records)
  assert [row['task'] for row in (total, qa, rag)] == ['all', 'qa', 'rag']
  assert total['num_outputs'] == 3
  assert (qa['serial'], qa['async'], qa['ratio']) == (3.0, 2.0, 2 / 3)
  assert qa['draft_ratio'] == 0.5
  assert rag['ratio'] == rag['ratio_low'] == rag['ratio_high'] == 1.0
  assert total['serial'] == 1 + 14 / 10
  assert total['ratio'] == pytest.approx((1 + 12 / 14) / 2.4)
  # Each draw has both of qa's outputs or one of them twice: all the same.
  assert qa['ratio_low'] == pytest.approx(2 / 3)
  assert total['ratio_low'] < total['ratio'] < total['ratio_high']
  assert total['hit_rate'] == 0.5
  json.dumps([total, qa, rag])
  table = acceptance_loss.table([total, qa, rag])
  assert '0.667' in table
  assert '0.920' in table  # the paper's


def test_interval_of_a_plain_bootstrap():
  rng = np.random.default_rng(1)
  serial = rng.integers(5, 20, 40)
  asynchronous = serial - rng.integers(0, 5, 40)
  records = [
    one
    for i in range(40)
    for one in both(i, 'qa', (int(serial[i]), 10), (int(asynchronous[i]), 10))
  ]
  row, _ = acceptance_loss.make_rows(NAMES, records)
  ratios = []
  for _ in range(4000):
    drawn = rng.integers(40, size=40)
    ratios.append(
      (400 + asynchronous[drawn].sum()) / (400 + serial[drawn].sum())
    )
  low, high = np.quantile(ratios, (0.025, 0.975))
  assert row['ratio_low'] == pytest.approx(low, abs=0.003)
  assert row['ratio_high'] == pytest.approx(high, abs=0.003)
  repeats = [
    dataclasses.replace(one, repeat=i) for one in records for i in range(3)
  ]
  again, _ = acceptance_loss.make_rows(NAMES, repeats)
  assert (again['ratio_low'], again['ratio_high']) == (
    row['ratio_low'],
    row['ratio_high'],
  )


def test_nothing_to_compare():
  plain = [record('serial', 1, 'qa', 1, 1)]
  assert acceptance_loss.make_rows(NAMES, plain) == []
  assert acceptance_loss.table([]) == ''
  row, _ = acceptance_loss.make_rows(NAMES, both(1, 'qa', (0, 2), (0, 2)))
  assert row['ratio'] == 1.0
  assert row['draft_ratio'] is None


def test_unequal_outputs_are_told():
  serial, asynchronous = both(1, 'qa', (2, 2), (2, 2))
  other = dataclasses.replace(asynchronous, token_ids=(9,))
  rows = acceptance_loss.make_rows(NAMES, [serial, other])
  assert not rows[0]['outputs_equal']
  assert acceptance_loss.table(rows).endswith('NO')
