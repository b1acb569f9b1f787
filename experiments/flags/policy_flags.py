"""The flag of how much decoders speculate."""

import functools
from collections.abc import Callable, Sequence

from absl import flags

from experiments.flags import modes, policy_names
from swiftspec_jax import errors, policies
from swiftspec_jax.cost_model.step_buckets import StepBuckets

_POLICY = flags.DEFINE_string(
  'policy',
  None,
  'How much to speculate, over pages as in serve, by a policy that needs no '
  f'--costs. Default: always as much as a draft may have. {policy_names.HELP}',
)


def is_given() -> bool:
  """Returns whether there is a policy."""
  return _POLICY.value is not None


def check(names: Sequence[str]) -> None:
  """Raises UserError for a policy that these modes cannot have."""
  if _POLICY.value is None:
    return
  if policy_names.needs_costs(_POLICY.value):
    raise errors.UserError(
      f'--policy={_POLICY.value} needs costs of a server; take one of none, '
      'fixed_K, always_K and goodput, or experiments.serve with --costs'
    )
  taking = [name for name in names if modes.MODES[name].takes_policy]
  if not taking:
    allowed = modes.where(lambda mode: mode.decodes and mode.takes_policy)
    raise errors.UserError(
      f'--policy={_POLICY.value} has no effect in mode {", ".join(names)}; it '
      f'is for {", ".join(allowed)}'
    )


def make(name: str) -> Callable[[StepBuckets], policies.Policy] | None:
  """Returns what makes the policy of a mode, None where there is none."""
  mode = modes.MODES[name]
  if _POLICY.value is None or not mode.takes_policy:
    return None
  return functools.partial(_make, mode)


def _make(mode: modes.Mode, buckets: StepBuckets) -> policies.Policy:
  return policy_names.make(
    _POLICY.value,
    None,
    buckets,
    None,
    is_tree=mode.makes_trees,
    drafts_by_model=mode.drafts_by_model,
  )


def to_json() -> dict[str, str | None]:
  """Returns the value of the flag, by name."""
  return {_POLICY.name: _POLICY.value}
