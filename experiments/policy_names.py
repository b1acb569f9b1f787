"""Policies by the names that flags give them."""

from experiments import load_report
from swiftspec_jax import cost_model, errors, policies
from swiftspec_jax.policies import loading
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.policies.estimators import TreeEstimator
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.policies.no_speculation import NoSpeculation
from swiftspec_jax.serving.step_buckets import StepBuckets

_TABLE = 'table'
HELP = (
  f'{load_report.NO_SPECULATION}, fixed_K with a number of draft tokens for K, '
  'always_K (the same with drafts before prompts, the usual baseline), '
  f'{_TABLE} (by batch size), {load_report.GOODPUT}, or a policy of your own '
  "as 'module:Class' (docs/add_a_policy.md)."
)


def needs_costs(name: str) -> bool:
  """Returns whether a policy cannot do without costs."""
  return name != load_report.NO_SPECULATION and not load_report.is_fixed(name)


def make(
  name: str,
  costs: cost_model.CostModel | None,
  buckets: StepBuckets,
  table: BatchTable | None,
  *,
  is_tree: bool = False,
) -> policies.Policy:
  """Returns a new policy.

  Args:
    name: see `HELP`.
    costs: of a step, for those that need them.
    buckets: the declared sizes.
    table: the policy that 'table' names.
    is_tree: drafts are trees.

  Raises:
    UserError: there is none of this name.
  """
  if name == load_report.NO_SPECULATION:
    return NoSpeculation()
  if name == _TABLE:
    return table
  if name == load_report.GOODPUT:
    return Goodput(costs, TreeEstimator() if is_tree else None)
  if ':' in name:
    return loading.load(name, costs)
  drafts_first = name.startswith(load_report.ALWAYS)
  kind = load_report.ALWAYS if drafts_first else load_report.FIXED
  length = name.removeprefix(kind)
  if name == length or not length.isdecimal():
    raise errors.UserError(
      f'unknown policy {name!r}; choose from none, fixed_K, always_K, table, '
      "goodput and 'module:Class'"
    )
  if int(length) not in buckets.lengths:
    raise errors.UserError(
      f'policy {name} is none of the declared lengths {buckets.lengths}'
    )
  return FixedLength(int(length), drafts_first=drafts_first)
