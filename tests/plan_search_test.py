"""What plans are chosen from, and what would reach a goal."""

import dataclasses

import numpy as np
import pytest
from plan_cases import CHIP, DRAFT, PAIR, RECORDINGS, TINY, recording

from configs import acceptance
from experiments.planning import plan_changes, plan_report, plan_search
from swiftspec_jax import errors
from swiftspec_jax.simulator.planning.forward import Forward

ROOMY = dataclasses.replace(
  PAIR, chip=dataclasses.replace(CHIP, memory_bytes=1e9)
)


def test_all_drafts_and_dtypes_are_tried():
  small = dataclasses.replace(
    DRAFT, name='small', config=TINY.with_layers(1), acceptance=0.25
  )
  deployment = dataclasses.replace(
    ROOMY, drafts=(DRAFT, small), weight_dtypes=('int8', None)
  )
  rarer = [recording(mode, 0.25) for mode in ('async', 'serial')]
  found, left_out = plan_search.plans(deployment, [*RECORDINGS, *rarer])
  assert not left_out
  # Drafts, dtypes of target and of draft, kernels, modes.
  assert len({plan.choice for plan in found}) == len(found) == 2 * 4 * 2 * 2
  for plan in found:
    acceptance_of_rounds = plan.recording.tree.forced_acceptance
    assert acceptance_of_rounds == plan.choice.draft.acceptance
    choice = plan.choice
    twin = dataclasses.replace(choice, draft=small)
    (other,) = (plan for plan in found if plan.choice == twin)
    is_small = choice.draft == small
    assert (other.price.draft.total < plan.price.draft.total) != is_small
  shown = plan_search.best_of(found, 'throughput', lambda c: c.group)
  assert len(shown) == 4
  assert max(shown, key=lambda p: p.tokens_per_second) == plan_search.best(
    found
  )


def test_what_does_not_fit_is_left_out_with_its_bytes():
  """In bfloat16 a model has 0.9 MB, in int4 less than half."""
  chip = dataclasses.replace(CHIP, memory_bytes=6e5)
  deployment = dataclasses.replace(
    PAIR, chip=chip, weight_dtypes=('int4', None), context=0
  )
  found, left_out = plan_search.plans(deployment, RECORDINGS)
  assert {plan.choice.weight_dtypes[0] for plan in found} == {'int4'}
  assert any('async 1+1, bfloat16 with' in reason for reason in left_out)
  assert all(' do not fit into the 0 GB of a toy' in r for r in left_out)
  with pytest.raises(errors.UserError, match='no plan fits'):
    plan_search.plans(
      dataclasses.replace(deployment, weight_dtypes=(None,)), RECORDINGS
    )
  unknown = dataclasses.replace(ROOMY, weight_dtypes=('mxfp4', None))
  _, left_out = plan_search.plans(unknown, RECORDINGS)
  assert any('for dense models' in reason for reason in left_out)


def test_parts_add_up_to_a_round():
  found, _ = plan_search.plans(ROOMY, RECORDINGS)
  for plan in found:
    rounds = plan.recording.rounds
    mean = rounds.seconds(plan.price.times).sum() / rounds.num_rounds.sum()
    assert sum(plan.parts.values()) == pytest.approx(mean)
  (row,) = (
    plan_report.row(plan, ROOMY)
    for plan in found
    if plan.choice.mode == 'async' and plan.choice.kernels
  )
  # Two expansions take longer than one verification of the same model.
  assert row['limit'].startswith('draft: ')


def test_goals_choose_differently():
  """More tokens in all, or in the slowest request."""
  uneven = recording('async', num_rounds=np.array([1, 3]))
  serial = recording('serial', num_rounds=np.array([30, 30]))
  found, _ = plan_search.plans(ROOMY, [serial, RECORDINGS[1], uneven])
  fast, even = (plan_search.best(found, goal) for goal in plan_search.GOALS)
  assert fast.recording is uneven
  assert even.recording is not uneven
  assert even.slow_tokens_per_second > fast.slow_tokens_per_second


@pytest.mark.parametrize('goal', plan_search.GOALS)
def test_only_speeds_of_all_requests_have_an_interval(goal):
  found, _ = plan_search.plans(ROOMY, RECORDINGS)
  ratios = np.ones(1), np.ones(1)
  rows = [plan_report.row(plan, ROOMY, ratios) for plan in found]
  summary = {
    'best': rows[0],
    'goal': {'tokens_per_second': 1e-3, 'of': goal},
    'what_if': {},
  }
  text = plan_report.advice(summary, {'rows': rows, 'needs': []})
  assert 'above the goal of 0.001: serial' in text
  assert ('with the whole interval' in text) == (goal == 'throughput')


def test_what_a_goal_needs_reaches_it():
  found, _ = plan_search.plans(ROOMY, RECORDINGS)
  chosen = plan_search.best(found)
  goal = 1.001 * chosen.tokens_per_second
  deployment = dataclasses.replace(ROOMY, goal=goal)
  rows = plan_changes.needs(deployment, RECORDINGS, chosen, 'throughput')
  length, *numbers = rows
  assert length == {
    'what': 'acceptance_length',
    'now': 3.6,
    'needed': pytest.approx(1.001 * 3.6),
  }
  for row in numbers:
    for factor, is_enough in ((1.0, True), (0.5, False)):
      value = row['now'] * (row['needed'] / row['now']) ** factor
      chip = dataclasses.replace(ROOMY.chip, **{row['what']: value})
      changed, _ = plan_search.plans(
        dataclasses.replace(deployment, chip=chip), RECORDINGS
      )
      speed = plan_search.best(changed).tokens_per_second
      assert (speed >= goal) == is_enough
  far = dataclasses.replace(ROOMY, goal=1e9)
  rows = plan_changes.needs(far, RECORDINGS, chosen, 'throughput')
  assert {row['needed'] for row in rows} == {None}
  near = dataclasses.replace(ROOMY, goal=0.5 * goal)
  assert not plan_changes.needs(near, RECORDINGS, chosen, 'throughput')


def test_what_a_goal_needs_keeps_the_dtypes():
  """In int8 the target is faster, which is no way to reach the goal here."""
  deployment = dataclasses.replace(ROOMY, weight_dtypes=('int8', None))
  found, _ = plan_search.plans(deployment, RECORDINGS)

  def rows_for(target_dtype, draft_dtype):
    dtypes = target_dtype, draft_dtype
    own = [plan for plan in found if plan.choice.weight_dtypes == dtypes]
    chosen = plan_search.best(own)
    goal = 1.001 * chosen.tokens_per_second
    wanted = dataclasses.replace(deployment, goal=goal)
    return plan_changes.needs(wanted, RECORDINGS, chosen, 'throughput')

  for dtypes in ((None, 'int8'), ('int8', None)):
    (bandwidth,) = (
      row for row in rows_for(*dtypes) if row['what'] == 'memory_bandwidth'
    )
    assert bandwidth['needed'] > 1.0001 * bandwidth['now']


def test_a_measured_step_changes_other_contexts_by_the_same_ratio():
  choice = next(
    choice for choice in plan_search.choices(ROOMY) if choice.mode == 'async'
  )
  tree = RECORDINGS[0].tree
  forward = Forward(
    config=TINY,
    num_chips=1,
    num_tokens=4,
    context=ROOMY.context,
    launches=plan_search.launches.counted(None, False).verify,
  )
  for context in (ROOMY.context, 2 * ROOMY.context):
    plain = dataclasses.replace(ROOMY, context=context)
    measured = dataclasses.replace(plain, measured=((forward, 1.5),))
    predicted, price = (
      plan_search.price_of(deployment, choice, tree)
      for deployment in (plain, measured)
    )
    assert price.measured == ('target',)
    assert price.target.total == pytest.approx(1.5 * predicted.target.total)
    assert price.draft == predicted.draft


def test_acceptance_of_chains():
  assert acceptance.of_chain((0.5 + 0.25 + 0.125) / 3, 3) == pytest.approx(0.5)


@pytest.mark.parametrize(
  ('dtypes', 'expected'),
  [
    (('int4', 'int4'), ('int4', None)),  # the draft's default is the target's
    (('int4', 'int8'), ('int4', 'int8')),
    (('int4', 'bfloat16'), ('int4', 'wide')),
    (('bfloat16', 'bfloat16'), (None, None)),
    (('bfloat16', 'int4'), (None, 'int4')),
  ],
)
@pytest.mark.parametrize('mode', ['serial', 'async'])
def test_plans_are_flags(mode, dtypes, expected):
  sizes = {'num_nodes': 8, 'width': 8, 'num_draft_steps': 4}
  names = 'weight_dtype', 'draft_weight_dtype'
  row = {'mode': mode, 'target_chips': 6, 'draft_chips': 2, **sizes}
  assert plan_report.flags_of(
    {**row, **dict(zip(names, dtypes, strict=True))}
  ) == {
    'mode': mode,
    'target_devices': 6,
    'draft_devices': 2 if mode == 'async' else None,
    **sizes,
    **dict(zip(names, expected, strict=True)),
  }
