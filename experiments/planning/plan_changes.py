"""What would make a deployment faster, and how much of it a goal needs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs import launches
from configs.deployment import Deployment
from experiments.planning import plan_search
from experiments.planning.plan_rounds import Recording
from experiments.planning.plan_search import GOALS, Plan

# Changes of the chip, by what is asked.
_WHAT_IFS: Mapping[str, Mapping[str, float]] = {
  'twice the memory bandwidth': {'memory_bandwidth': 2.0},
  'half the time of an all-reduce': {'link_latency': 0.5},
  'half the time of a launch': {'launch_seconds': 0.5},
}
# Numbers of a chip, and the greatest change of each that is looked at.
_MOST = {
  'memory_bandwidth': 64,
  'link_latency': 1 / 64,
  'launch_seconds': 1 / 64,
}
_NUM_HALVINGS = 16


def what_ifs(
  deployment: Deployment, recordings: Sequence[Recording], goal: str
) -> dict[str, float]:
  """Returns the tokens per second of the best plan after each change."""
  speeds = {
    name: _speed(_changed(deployment, factors), recordings, goal)
    for name, factors in _WHAT_IFS.items()
  }
  perfect = [
    dataclasses.replace(
      recording,
      rounds=dataclasses.replace(
        recording.rounds, num_waits=np.zeros_like(recording.rounds.num_waits)
      ),
    )
    if recording.mode == 'async'
    else recording
    for recording in recordings
  ]
  speeds['async and no waits after verdicts'] = _speed(
    deployment, perfect, goal
  )
  speeds["as few kernels as in SwiftSpec's paper"] = _speed(
    deployment, recordings, goal, launches.published
  )
  return speeds


def needs(
  deployment: Deployment,
  recordings: Sequence[Recording],
  chosen: Plan,
  goal: str,
) -> list[dict[str, Any]]:
  """Returns what each number would have to be for the deployment's goal.

  Each is changed alone. The models of the best plan stay, and their dtypes; the
  split and the sizes of the tree are chosen anew.

  Args:
    deployment: models and chips, with a goal.
    recordings: rounds.
    chosen: best plan.
    goal: one of `GOALS`.

  Returns:
    Rows of `what`, `now` and `needed`, which is None where no such number will
    do. There are none if the plan reaches the goal.
  """
  wanted, speed = deployment.goal, getattr(chosen, GOALS[goal])
  if wanted is None or speed >= wanted:
    return []
  choice, chip = chosen.choice, deployment.chip
  dtypes = choice.weight_dtypes
  deployment = dataclasses.replace(
    deployment,
    drafts=(choice.draft,),
    weight_dtypes=tuple(dict.fromkeys(dtypes)),
    published=(),
  )
  length = chosen.recording.rounds.acceptance_length
  needed = length * wanted / speed
  rows = [
    {
      'what': 'acceptance_length',
      'now': length,
      'needed': needed if needed <= chosen.recording.tree.num_nodes else None,
    }
  ]
  for name, most in _MOST.items():
    factor = _least_change(deployment, recordings, goal, dtypes, name, most)
    now = getattr(chip, name)
    needed = None if factor is None else now * factor
    rows.append({'what': name, 'now': now, 'needed': needed})
  return rows


def _least_change(
  deployment, recordings, goal, dtypes, name, most
) -> float | None:
  """Returns the factor nearest to 1 that reaches the goal; None without one."""

  def reaches(factor: float) -> bool:
    changed = _changed(deployment, {name: factor})
    return _speed(changed, recordings, goal, dtypes=dtypes) >= deployment.goal

  too_little, enough = 1.0, most
  if not reaches(enough):
    return None
  for _ in range(_NUM_HALVINGS):
    middle = (too_little * enough) ** 0.5
    if reaches(middle):
      enough = middle
    else:
      too_little = middle
  return enough


def _changed(
  deployment: Deployment, factors: Mapping[str, float]
) -> Deployment:
  chip = deployment.chip
  values = {name: f * getattr(chip, name) for name, f in factors.items()}
  return dataclasses.replace(
    deployment, chip=dataclasses.replace(chip, **values)
  )


def _speed(
  deployment, recordings, goal, programs_of=launches.counted, dtypes=None
) -> float:
  found, _ = plan_search.plans(deployment, recordings, programs_of)
  if dtypes is not None:
    found = [plan for plan in found if plan.choice.weight_dtypes == dtypes]
  return getattr(plan_search.best(found, goal), GOALS[goal])
