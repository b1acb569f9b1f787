"""The flag of how much decoders speculate."""

import functools
from collections.abc import Callable, Sequence

from absl import flags

from swiftspec_jax import errors, policies
from swiftspec_jax.cli.flags import modes, policy_names
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets

_POLICY = flags.DEFINE_string(
  'policy',
  None,
  'How much to speculate, over pages as in serve: none, fixed_K or always_K '
  'with a number of draft tokens for K, or goodput. Default: always as much as '
  'a draft may have.',
)


def is_given() -> bool:
  """Returns whether there is a policy."""
  return _POLICY.value is not None


def check(names: Sequence[str]) -> None:
  """Raises UserError for a policy that these modes cannot have."""
  if _POLICY.value is None:
    return
  has_length = _POLICY.value.rpartition('_')[2].isdecimal()
  is_fixed = policy_names.is_fixed(_POLICY.value)
  if policy_names.needs_costs(_POLICY.value) or (is_fixed and not has_length):
    raise errors.UserError(
      f'--policy={_POLICY.value} is none of none, fixed_K, always_K and '
      'goodput; others need costs: swiftspec serve with --costs'
    )
  taking = modes.where(lambda mode: mode.decodes and mode.takes_policy)
  without = [name for name in names if name not in (*taking, modes.PLAIN)]
  if without or not {*names} & {*taking}:
    raise errors.UserError(
      f'--policy={_POLICY.value} has no effect in mode '
      f'{", ".join(without or names)}; it is for {", ".join(taking)}'
    )


def make(name: str) -> Callable[[StepBuckets], policies.Policy] | None:
  """Returns what makes the policy of a mode, None where there is none."""
  mode = modes.MODES[name]
  if _POLICY.value is None or not mode.takes_policy:
    return None
  return functools.partial(
    policy_names.make,
    _POLICY.value,
    is_tree=mode.makes_trees,
    drafts_by_model=mode.drafts_by_model,
  )
