"""Costs: published, measured, saved. Items are those of the checklist."""

import dataclasses
import json

import numpy as np
import pytest
import serving_cases as cases

from swiftspec_jax import errors
from swiftspec_jax.policies.cost_model import (
  measured,
  profiles,
  storage,
  tables,
)
from swiftspec_jax.policies.cost_model.measured import CostKey, Measurement
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets

BUCKETS = StepBuckets(
  rows=(1, 2, 4, 8), query_tokens=(1, 2, 4, 8, 16, 32), lengths=(0, 1, 2, 3)
)
KEY = CostKey(
  target='target',
  draft='prompt_lookup',
  dtype='float32',
  device_kind='cpu',
  num_devices=1,
  buckets=BUCKETS,
)
CONTEXTS = (0, 1000, 8000)


def target_seconds(rows, tokens, kv_tokens):
  return 0.03 + 0.0002 * rows + 0.001 * tokens + 1e-6 * kv_tokens


def measurements(noise=0.0):
  """A machine whose plain steps are cheaper than the others tell."""
  generator = np.random.default_rng(0)
  found = []

  def add(seconds, **fields):
    seconds *= 1 + noise * generator.standard_normal()
    found.append(Measurement(seconds=seconds, **fields))

  for rows in BUCKETS.rows:
    for kv in CONTEXTS:
      sizes = {'num_rows': rows, 'kv_tokens': kv}
      add(0.02 + 0.001 * rows + 1e-6 * kv, part='plain', **sizes)
      add(0.005 + 1e-7 * kv, part='intake', **sizes)
      for tokens in BUCKETS.query_tokens:
        if tokens >= rows:
          add(
            target_seconds(rows, tokens, kv),
            part='target',
            num_query_tokens=tokens,
            **sizes,
          )
      for steps in (1, 3):
        seconds = steps * (0.002 + 0.0001 * rows + 1e-8 * kv)
        add(seconds, part='draft', num_draft_steps=steps, **sizes)
    for tokens in (8, 32):
      add(0.001, part='overhead', num_rows=rows, num_query_tokens=tokens)
  return found


COSTS = measured.fit(KEY, measurements())


def test_parts_of_a_step():
  """Item 10: exact at the points, and plain steps on their own."""
  step = COSTS.predict(4, 16, 1000, 3)
  assert step.target == pytest.approx(target_seconds(4, 16, 1000))
  assert step.draft == pytest.approx(3 * (0.0024 + 1e-5))
  assert step.overhead == pytest.approx(0.001)
  assert COSTS.predict(4, 4, 1000, 0).total == pytest.approx(0.025)
  # Drafting that finds nothing ends in a plain step.
  nothing = COSTS.predict(4, 4, 1000, 3, finds_drafts=False)
  assert nothing.target == pytest.approx(0.025)
  assert nothing.draft == step.draft
  # A step with prompts is none of the plain ones.
  beside = COSTS.predict(4, 16, 1000, 0)
  assert beside.total == pytest.approx(target_seconds(4, 16, 1000))


def test_what_a_draft_model_takes_in():
  step = COSTS.predict(4, 16, 1000, 3, prefills_draft=True)
  assert step.draft_prefill == pytest.approx(0.0051)
  without = COSTS.predict(4, 16, 1000, 3)
  assert step.total == pytest.approx(without.total + 0.0051)
  # One step takes a chunk in, the other does not.
  prefills_draft = np.array([[False], [True]])
  steps = COSTS.predict(
    4, np.array([8, 16]), 1000, 3, prefills_draft=prefills_draft
  )
  np.testing.assert_allclose(steps.draft_prefill, [[0.0], [0.0051]])
  assert steps.total.shape == (2, 2)


def test_points_between():
  """Item 10."""
  steps = COSTS.predict(2, np.array([[8], [16]]), 4500, np.array([1, 2, 3]))
  assert steps.total.shape == (2, 3)
  assert steps.target[0, 0] == pytest.approx(target_seconds(2, 8, 4500))
  # Two forwards were not measured.
  assert steps.draft[1] == pytest.approx(2 * (0.0022 + 4.5e-5))
  assert steps.overhead[0, 0] == pytest.approx(0.001)


def test_extrapolation_is_flagged(caplog):
  """Item 10."""
  costs = measured.fit(KEY, measurements())
  costs.predict(2, 8, 8000, 0)
  assert not caplog.text
  costs.predict(2, 8, 8001, 0)
  costs.predict(2, 8, 30_000, 0)
  assert caplog.text.count('were measured with up to 8000 tokens') == 1
  far = costs.predict(2, 8, 20_000, 0).total
  assert far == pytest.approx(target_seconds(2, 8, 20_000))


def test_padding_costs():
  """Item 11: time goes by the declared sizes."""
  assert COSTS.predict(3, 9, 0, 1).total == COSTS.predict(4, 16, 0, 1).total


def test_noise_makes_no_cost_fall():
  """Item 10."""
  costs = measured.fit(KEY, measurements(noise=0.02))
  for table in costs.parts.values():
    assert (table.seconds >= 0).all()
    assert (table.kv_slopes >= 0).all()
    for axis in range(3):
      assert (np.diff(table.seconds, axis=axis) >= -1e-12).all()
  truth = target_seconds(4, 16, 1000)
  assert costs.predict(4, 16, 1000, 0).total == pytest.approx(truth, rel=0.05)


def test_times_may_jump_between_sizes():
  """As those of products with one row and with two."""
  first, *others = KEY.buckets.rows
  jumping = [
    dataclasses.replace(m, seconds=0.01 if m.num_rows == first else 0.02)
    if m.part == 'plain'
    else m
    for m in measurements()
  ]
  costs = measured.fit(KEY, jumping)
  assert costs.predict(first, first, 100, 0).total == pytest.approx(0.01)
  for rows in others:
    assert costs.predict(rows, rows, 100, 0).total == pytest.approx(0.02)


def test_measurements_that_make_no_sense_are_refused():
  """Item 10; by their relative error, which is what plans suffer from."""
  generator = np.random.default_rng(0)
  shuffled = [
    dataclasses.replace(m, seconds=generator.random())
    if m.part == 'target'
    else m
    for m in measurements()
  ]
  with pytest.raises(errors.UserError, match='times of target do not grow'):
    measured.fit(KEY, shuffled)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda m: m.part != 'plain', "no measurements of 'plain'"),
    (lambda m: m.part != 'draft' or m.num_rows == 16, "of 'draft'"),
  ],
)
def test_every_part_has_to_be_measured(change, message):
  with pytest.raises(errors.UserError, match=message):
    measured.fit(KEY, [m for m in measurements() if change(m)])


def test_sizes_have_to_be_declared():
  odd = Measurement(part='plain', num_rows=3, seconds=0.1)
  with pytest.raises(errors.UserError, match='plain was measured at 3, which'):
    measured.fit(KEY, [*measurements(), odd])
  few = [m for m in measurements() if m.part != 'plain']
  with pytest.raises(errors.UserError, match='plain was measured at 1 points'):
    measured.fit(
      KEY, few + [Measurement(part='plain', num_rows=1, seconds=0.1)] * 2
    )


def test_the_median_of_repeats_counts():
  outlier = Measurement(part='plain', num_rows=8, kv_tokens=8000, seconds=0.5)
  values = [*measurements(), *(measurements() * 2), outlier]
  costs = measured.fit(KEY, values)
  assert costs.predict(8, 8, 8000, 0).total == pytest.approx(0.036)


def test_saved_costs(tmp_path):
  path = tmp_path / 'costs.json'
  storage.save(path, COSTS)
  loaded = storage.load(path, KEY)
  assert loaded.key == KEY
  arguments = 4, np.array([4, 16]), 4500, np.array([0, 2])
  np.testing.assert_array_equal(
    loaded.predict(*arguments).total, COSTS.predict(*arguments).total
  )


def test_costs_of_before_the_intake_was_measured(tmp_path, caplog):
  """They are taken as they are, and it is said what they lack."""
  old = [m for m in measurements() if m.part != 'intake']
  path = tmp_path / 'costs.json'
  storage.save(path, measured.fit(KEY, old))
  loaded = storage.load(path, KEY)
  assert loaded.predict(4, 16, 1000, 3, prefills_draft=True).draft_prefill == 0
  assert not loaded.drafts_by_model
  assert 'how long a draft model takes for prompts' in caplog.text


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'target': 'other'}, "with target='target', here it is 'other'"),
    ({'device_kind': 'TPU v5'}, "device_kind='cpu', here it is 'TPU v5'"),
    ({'num_devices': 2}, 'num_devices=1, here it is 2'),
    (
      {'buckets': dataclasses.replace(BUCKETS, rows=(1, 8))},
      r'rows=\(1, 2, 4, 8\), here it is \(1, 8\)',
    ),
  ],
)
def test_costs_of_something_else_are_refused(change, message, tmp_path):
  path = tmp_path / 'costs.json'
  storage.save(path, COSTS)
  with pytest.raises(errors.UserError, match=message):
    storage.load(path, dataclasses.replace(KEY, **change))


def test_files_that_are_no_costs_are_refused(tmp_path):
  path = tmp_path / 'costs.json'
  with pytest.raises(errors.UserError, match='cannot read costs from'):
    storage.load(path)
  path.write_text('{"format": 7}')
  with pytest.raises(errors.UserError, match='holds no costs of format 1'):
    storage.load(path)
  storage.save(path, COSTS)
  values = json.loads(path.read_text())
  del values['key']['target']
  path.write_text(json.dumps(values))
  with pytest.raises(errors.UserError, match='is damaged'):
    storage.load(path)


def test_published_profiles():
  """Against the formula, in ms, with the published digits."""
  step = profiles.get('llama-8b-h100').predict(16, 16 * 5, 16 * 512, 4)
  target = (
    4.85907942e-05 * 16 * 512
    + 1.84383603e-02 * 80
    - 4.33144783e-02 * 16
    + 6.938699571857084
  )
  draft = (
    2.89700974e-06 * 16 * 512
    + 4.38694070e-05 * 16
    + 4.52175870e-01 * 4
    + 5.52805909e-03 * 16
    + 0.4471109584339972
  )
  assert step.target * 1e3 == pytest.approx(target)
  assert step.draft * 1e3 == pytest.approx(draft)
  assert step.overhead * 1e3 == pytest.approx(0.05 * target)
  with pytest.raises(errors.UserError, match="no published profile 'gpt'"):
    profiles.get('gpt')


@pytest.mark.parametrize('name', list(profiles.PROFILES))
def test_monotone_profiles(name):
  """Item 10: the published 8B fit makes larger batches faster."""
  rows = np.arange(1, 513)
  steps = np.arange(8)[:, None]
  for kv_length in (0, 128, 512):
    costs = profiles.get(name).monotone()
    seconds = costs.predict(rows, rows * (steps + 1), rows * kv_length, steps)
    assert (np.diff(seconds.total, axis=0) > 0).all()
    assert (np.diff(seconds.total, axis=1) >= -1e-12).all()
  published = cases.EAGLE_8B.predict(rows, rows, rows * 128, 0).total
  assert np.diff(published).max() < 0


def test_a_table_of_one_context():
  table = tables.CostTable(
    first=np.array([1, 2]),
    second=np.array([0]),
    kv_tokens=np.array([0]),
    seconds=np.array([[[1.0]], [[2.0]]]),
    kv_slopes=np.array([[0.5], [0.5]]),
  )
  assert table(2, 0, 0) == 2.0
  assert table(1, 0, 4) == 3.0


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'rows': (2, 1)}, 'rows must be ascending'),
    ({'query_tokens': (1, 4)}, 'query_tokens must be ascending, up to at'),
    ({'lengths': (1, 2)}, 'lengths must be ascending, and begin with 0'),
    ({'draft_steps': (0, 2, 1, 3)}, 'draft_steps must be 0 and then not'),
    ({'draft_steps': (0, 1)}, 'draft_steps must be 0 and then not'),
  ],
)
def test_declared_sizes_are_checked(fields, message):
  with pytest.raises(errors.UserError, match=message):
    dataclasses.replace(BUCKETS, **fields)


def test_powers_of_two():
  buckets = StepBuckets.powers_of_two(6, 40, 2)
  assert buckets.rows == (1, 2, 4, 6)
  assert buckets.query_tokens == (1, 2, 4, 8, 12, 16, 24, 32, 40)
  assert buckets.lengths == buckets.draft_steps == (0, 1, 2)
  assert buckets.pad_rows(3) == 4
  assert buckets.pad_query_tokens(13) == 16
  # Three rows of a token each have a program for four rows.
  computed = buckets.computed_tokens(3, np.array([3, 4, 9.5]))
  assert computed.tolist() == [4, 4, 12]
  assert buckets.computed_tokens(5, 5) == 6
  assert buckets.computed_tokens(5, 6) == 8
  assert buckets.steps_of(0) == 0
  tree = dataclasses.replace(buckets, lengths=(0, 3, 7), draft_steps=(0, 1, 2))
  assert [tree.steps_of(n) for n in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 2]
