"""The price of recorded rounds on the chips of a deployment."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

from configs import launches
from configs.deployment import Deployment, Draft
from configs.launches import ProgramsOf
from experiments.planning.plan_rounds import Recording
from swiftspec_jax import errors
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.simulator.planning import forward as forward_lib
from swiftspec_jax.simulator.planning.forward import Forward, ForwardSeconds
from swiftspec_jax.simulator.planning.rounds import Times

# What a plan is chosen for, and the attribute that says how good it is.
GOALS = {
  'throughput': 'tokens_per_second',
  'latency': 'slow_tokens_per_second',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """What is chosen beside the sizes of the tree.

  Attributes:
    mode: 'serial' or 'async'.
    target_chips: chips of the target; all of them in serial mode.
    draft_chips: chips of the draft; all of them in serial mode.
    kernels: whether the programs have kernels of `kernels_pallas`.
    draft: model that grows the tree.
    weight_dtypes: dtypes of the matrices of target and draft; None is bfloat16.
  """

  mode: str
  target_chips: int
  draft_chips: int
  kernels: bool
  draft: Draft
  weight_dtypes: tuple[str | None, str | None]

  @property
  def chips(self) -> str:
    """Chips of target and draft, or those that they share."""
    draft = f'+{self.draft_chips}' if self.mode == 'async' else ''
    return f'{self.target_chips}{draft}'

  @property
  def name(self) -> str:
    """The choice in a few words."""
    target, draft = (dtype or 'bfloat16' for dtype in self.weight_dtypes)
    return (
      f'{self.mode} {self.chips}, {target} with {self.draft.name} {draft}, '
      f'{"" if self.kernels else "no "}kernels'
    )

  @property
  def group(self) -> tuple[str, int, bool]:
    """What the best plan is shown of."""
    return self.mode, self.target_chips, self.kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
  """Seconds of what rounds are made of.

  Attributes:
    target: parts of a verification.
    draft: parts of an expansion.
    handoff: seconds between a verdict and the next verification.
    measured: those of 'target' and 'draft' that were timed on the chip.
  """

  target: ForwardSeconds
  draft: ForwardSeconds
  handoff: float
  measured: tuple[str, ...]

  @property
  def times(self) -> Times:
    """The sums of the parts."""
    return Times(
      target=self.target.total, draft=self.draft.total, handoff=self.handoff
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """One way to decode, and its price.

  Attributes:
    choice: all but the sizes.
    recording: sizes and rounds.
    price: seconds of the parts of a round.
  """

  choice: Choice
  recording: Recording
  price: Price

  @property
  def tokens_per_second(self) -> float:
    """The speed of all requests together."""
    return self.recording.rounds.tokens_per_second(self.price.times)

  @property
  def slow_tokens_per_second(self) -> float:
    """The speed that 95 % of the requests reach."""
    return self.recording.rounds.slow_tokens_per_second(self.price.times)

  @property
  def parts(self) -> dict[str, float]:
    """Seconds of a mean round by what they are spent on."""
    rounds, times = self.recording.rounds, self.price.times
    found = {'handoff': times.handoff}
    num_forwards = rounds.num_waits.sum() / rounds.num_rounds.sum()
    if rounds.num_growth_steps * times.draft > times.target:
      num_forwards += rounds.num_growth_steps  # the target waits for them
    else:
      found |= {f'target: {k}': v for k, v in self.price.target.parts.items()}
    for name, seconds in self.price.draft.parts.items():
      found[f'draft: {name}'] = float(num_forwards * seconds)
    return found


def plans(
  deployment: Deployment,
  recordings: Sequence[Recording],
  programs_of: ProgramsOf = launches.counted,
) -> tuple[list[Plan], list[str]]:
  """Returns all plans that can be made, and why others cannot.

  Args:
    deployment: models and chips.
    recordings: rounds with the acceptance of each draft.
    programs_of: function that returns the kernels of a round.

  Raises:
    UserError: there is none.
  """
  found, refused = [], {}
  for choice in choices(deployment):
    for num_nodes in deployment.num_nodes:
      own = [
        recording
        for recording in recordings
        if (recording.mode, recording.tree.num_nodes)
        == (choice.mode, num_nodes)
        and recording.tree.forced_acceptance == choice.draft.acceptance
      ]
      try:
        price = price_of(deployment, choice, own[0].tree, programs_of)
      except errors.UserError as error:
        refused[str(error)] = f'{choice.name}: {error}'
        break
      found += [
        Plan(choice=choice, recording=recording, price=price)
        for recording in own
      ]
  if not found:
    raise errors.UserError(
      f'{deployment.name}: no plan fits: {"; ".join(refused.values())}'
    )
  return found, list(refused.values())


def choices(deployment: Deployment) -> Iterator[Choice]:
  """Yields all that can be chosen beside the sizes of the tree."""
  total = deployment.num_chips
  splits = [('serial', total, total)]
  splits += [('async', n, total - n) for n in deployment.target_chips]
  dtypes = itertools.product(deployment.weight_dtypes, repeat=2)
  models = itertools.product(deployment.drafts, dtypes, (False, True))
  for draft, weight_dtypes, kernels in models:
    for mode, target_chips, draft_chips in splits:
      yield Choice(
        mode=mode,
        target_chips=target_chips,
        draft_chips=draft_chips,
        kernels=kernels,
        draft=draft,
        weight_dtypes=weight_dtypes,
      )


def price_of(
  deployment: Deployment,
  choice: Choice,
  tree: TreeConfig,
  programs_of: ProgramsOf = launches.counted,
) -> Price:
  """Returns the seconds of what rounds are made of.

  Args:
    deployment: models and chips.
    choice: all but the sizes; where both models have all chips, they take
      turns.
    tree: sizes of the trees.
    programs_of: function that returns the kernels of a round.

  Raises:
    UserError: the models do not fit into the chips' memory, or a model cannot
      have such weights.
  """
  chip, context = deployment.chip, deployment.context
  dtype, draft_dtype = choice.weight_dtypes
  of_draft = programs_of(draft_dtype, choice.kernels)
  target = Forward(
    config=dataclasses.replace(deployment.target, weight_dtype=dtype),
    num_chips=choice.target_chips,
    num_tokens=tree.num_nodes,
    context=context,
    launches=programs_of(dtype, choice.kernels).verify,
  )
  draft = Forward(
    config=dataclasses.replace(choice.draft.config, weight_dtype=draft_dtype),
    num_chips=choice.draft_chips,
    num_tokens=tree.num_leaves,
    context=context,
    launches=of_draft.grow,
  )
  is_shared = choice.mode == 'serial'
  for models in [(target, draft)] if is_shared else [(target,), (draft,)]:
    forward_lib.check_fits(models, chip)
  advance = of_draft.advance.of(draft.config) * chip.launch_seconds
  steps = {'target': target, 'draft': draft}
  ratios = {name: _measured_ratio(deployment, f) for name, f in steps.items()}
  return Price(
    **{
      name: forward_lib.predict(forward, chip).scaled(ratios[name] or 1.0)
      for name, forward in steps.items()
    },
    handoff=advance + (0.0 if is_shared else 2 * chip.link_latency),
    measured=tuple(name for name, ratio in ratios.items() if ratio),
  )


def _measured_ratio(deployment: Deployment, forward: Forward) -> float | None:
  """Returns the ratio of the same forward in any context, if it was timed."""
  for timed, ratio in deployment.measured:
    if dataclasses.replace(timed, context=forward.context) == forward:
      return ratio
  return None


def best(found: Sequence[Plan], goal: str = 'throughput') -> Plan:
  """Returns the best plan for one of `GOALS`."""
  return max(found, key=lambda plan: getattr(plan, GOALS[goal]))


def best_of(
  found: Sequence[Plan], goal: str, key: Callable[[Choice], Hashable]
) -> list[Plan]:
  """Returns the best plan for a goal in each group; `key` groups choices."""
  groups: dict[Hashable, list[Plan]] = {}
  for plan in found:
    groups.setdefault(key(plan.choice), []).append(plan)
  return [best(own, goal) for own in groups.values()]
