"""The price of recorded rounds on the chips of a deployment."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from configs import launches
from configs.deployment import Deployment, Published
from configs.launches import Programs, ProgramsOf
from experiments.planning.plan_rounds import Recording
from swiftspec_jax import errors
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.planning import forward as forward_lib
from swiftspec_jax.planning import rounds as rounds_lib
from swiftspec_jax.planning.forward import Chip, Forward, ForwardSeconds
from swiftspec_jax.planning.rounds import Times

_WIDE = 'bfloat16'  # of matrices that are not quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """One way to decode, and its price.

  Attributes:
    recording: mode, sizes and rounds.
    target_chips: chips of the target; all of them in serial mode.
    draft_chips: chips of the draft; all of them in serial mode.
    kernels: whether the programs have kernels of `kernels_pallas`.
    weight_dtype: dtype of the matrices.
    times: predicted seconds.
    target: parts of the target's.
  """

  recording: Recording
  target_chips: int
  draft_chips: int
  kernels: bool
  weight_dtype: str | None
  times: Times
  target: ForwardSeconds

  @property
  def tokens_per_second(self) -> float:
    """The speed of all requests together."""
    return self.recording.rounds.tokens_per_second(self.times)

  @property
  def group(self) -> tuple:
    """What plans of other sizes share with it."""
    return (
      self.weight_dtype,
      self.recording.mode,
      self.target_chips,
      self.kernels,
    )

  @property
  def limit(self) -> str:
    """What most of a round is spent on."""
    rounds = self.recording.rounds
    waits = rounds.num_waits.sum() / rounds.num_rounds.sum()
    forwards = max(waits, rounds.num_growth_steps)
    if forwards * self.times.draft > self.times.target:
      return 'draft forwards'
    return f'target: {self.target.limit}'


def plans(
  deployment: Deployment,
  recordings: Sequence[Recording],
  programs_of: ProgramsOf = launches.counted,
) -> tuple[list[Plan], list[str]]:
  """Returns all plans that fit into the chips' memory, and why others do not.

  Args:
    deployment: models and chips.
    recordings: rounds.
    programs_of: function that returns the kernels of a round.

  Raises:
    UserError: none does.
  """
  found, refused = [], {}
  for weight_dtype, is_fused, recording in itertools.product(
    deployment.weight_dtypes, (False, True), recordings
  ):
    for split in splits(deployment, recording.mode):
      try:
        found.append(
          _plan(
            deployment, recording, split, weight_dtype, is_fused, programs_of
          )
        )
      except errors.UserError as error:
        name = f'{weight_dtype or "bfloat16"} {recording.mode} {split}'
        refused[name] = f'{name}: {error}'
  if not found:
    raise errors.UserError(
      f'{deployment.name}: no plan fits: {"; ".join(refused.values())}'
    )
  return found, list(refused.values())


def splits(deployment: Deployment, mode: str) -> Iterator[tuple[int, int]]:
  """Yields chips of target and of draft to choose from."""
  total = deployment.num_chips
  if mode == 'serial':
    yield total, total
  else:
    yield from ((n, total - n) for n in deployment.target_chips)


def _plan(
  deployment, recording, split, weight_dtype, is_fused, programs_of
) -> Plan:
  times, target = times_of(
    deployment,
    split,
    recording.tree,
    weight_dtype,
    programs_of(weight_dtype, is_fused),
  )
  return Plan(
    recording=recording,
    target_chips=split[0],
    draft_chips=split[1],
    kernels=is_fused,
    weight_dtype=weight_dtype,
    times=times,
    target=target,
  )


def times_of(
  deployment: Deployment,
  split: tuple[int, int],
  tree: TreeConfig,
  weight_dtype: str | None,
  programs: Programs,
  *,
  num_rows: int = 1,
) -> tuple[Times, ForwardSeconds]:
  """Returns predicted seconds, and the parts of a verification.

  Args:
    deployment: models and chips.
    split: chips of target and of draft; where both have all, they take turns.
    tree: sizes of the trees.
    weight_dtype: dtype of the matrices.
    programs: kernels of a round.
    num_rows: requests that decode together.

  Raises:
    UserError: the models do not fit into the chips' memory.
  """
  chip = deployment.chip
  target, draft = (
    Forward(
      config=dataclasses.replace(config, weight_dtype=weight_dtype),
      num_chips=num_chips,
      num_tokens=num_tokens * num_rows,
      context=deployment.context * num_rows,
      launches=own,
    )
    for config, num_chips, num_tokens, own in zip(
      (deployment.target, deployment.draft),
      split,
      (tree.num_nodes, tree.width),
      (programs.verify, programs.grow),
      strict=True,
    )
  )
  is_shared = sum(split) > deployment.num_chips
  for models in [(target, draft)] if is_shared else [(target,), (draft,)]:
    forward_lib.check_fits(models, chip)
  seconds = forward_lib.predict(target, chip)
  advance = programs.advance.of(deployment.draft) * chip.launch_seconds
  times = Times(
    target=seconds.total,
    draft=forward_lib.predict(draft, chip).total,
    handoff=advance + (0.0 if is_shared else 2 * chip.link_latency),
  )
  return times, seconds


def best(found: Sequence[Plan]) -> Plan:
  """Returns the fastest plan."""
  return max(found, key=lambda plan: plan.tokens_per_second)


def best_of_groups(found: Sequence[Plan]) -> list[Plan]:
  """Returns for each dtype, mode, split and kernels the best sizes."""
  groups: dict[tuple, list[Plan]] = {}
  for plan in found:
    groups.setdefault(plan.group, []).append(plan)
  return [best(own) for own in groups.values()]


def row(
  plan: Plan,
  deployment: Deployment,
  ratios: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:
  """Returns a line of rows.jsonl; with `ratios` it has an interval."""
  tree = plan.recording.tree
  values = {
    'weight_dtype': plan.weight_dtype or _WIDE,
    'mode': plan.recording.mode,
    'target_chips': plan.target_chips,
    'draft_chips': plan.draft_chips,
    'kernels': plan.kernels,
    'num_nodes': tree.num_nodes,
    'width': tree.width,
    'num_draft_steps': tree.num_draft_steps,
    'acceptance_length': plan.recording.rounds.acceptance_length,
    'target_step_seconds': plan.times.target,
    'draft_step_seconds': plan.times.draft,
    'tokens_per_second': plan.tokens_per_second,
  }
  if ratios is not None:
    low, high = rounds_lib.interval(plan.recording.rounds, plan.times, *ratios)
    known = [p for p in deployment.published if is_of(plan, p)]
    values |= {
      'low': low,
      'high': high,
      'published': known[0].tokens_per_second if known else None,
    }
  return {**values, 'limit': plan.limit}


def flags_of(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of flags that a row stands for, by name."""
  weight_dtype, is_async = row['weight_dtype'], row['mode'] == 'async'
  return {
    'mode': row['mode'],
    'weight_dtype': None if weight_dtype == _WIDE else weight_dtype,
    'target_devices': row['target_chips'],
    'draft_devices': row['draft_chips'] if is_async else None,
    **{name: row[name] for name in ('num_nodes', 'width', 'num_draft_steps')},
  }


def is_of(plan: Plan, published: Published) -> bool:
  """Whether a published figure is of this kind of plan: int4 and fused."""
  key = 'int4', published.mode, published.target_chips, True
  return plan.group == key


# What would make a deployment faster: changes of its chip.
_CHANGES: Mapping[str, Mapping[str, float]] = {
  'twice the memory bandwidth': {'memory_bandwidth': 2.0},
  'half the time of an all-reduce': {'link_latency': 0.5},
  'half the time of a launch': {'launch_seconds': 0.5},
}


def what_ifs(
  deployment: Deployment, recordings: Sequence[Recording]
) -> dict[str, float]:
  """Returns the tokens per second of the best plan after each change."""

  def changed(factors: Mapping[str, float]) -> Chip:
    return dataclasses.replace(
      deployment.chip,
      **{k: v * getattr(deployment.chip, k) for k, v in factors.items()},
    )

  speeds = {
    name: best(
      plans(dataclasses.replace(deployment, chip=changed(factors)), recordings)[
        0
      ]
    ).tokens_per_second
    for name, factors in _CHANGES.items()
  }
  perfect = [
    dataclasses.replace(
      recording,
      rounds=dataclasses.replace(
        recording.rounds, num_waits=np.zeros_like(recording.rounds.num_waits)
      ),
    )
    for recording in recordings
    if recording.mode == 'async'
  ]
  speeds['async and no waits after verdicts'] = best(
    plans(deployment, perfect)[0]
  ).tokens_per_second
  speeds["as few kernels as in SwiftSpec's paper"] = best(
    plans(deployment, recordings, launches.published)[0]
  ).tokens_per_second
  return speeds
