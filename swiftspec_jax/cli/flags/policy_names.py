"""Policies by the names that flags give them."""

from swiftspec_jax import errors, policies
from swiftspec_jax.policies import auto, cost_model, loading
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.policies.fixed_length import FixedLength

NO_SPECULATION = 'none'
FIXED = 'fixed_'
ALWAYS = 'always_'
GOODPUT = 'goodput'
_TABLE = 'table'
HELP = (
  f'{NO_SPECULATION}, fixed_K with a number of draft tokens for K, '
  'always_K (the same with drafts before prompts, the usual baseline), '
  f'{_TABLE} (by batch size), {GOODPUT}, or a policy of your own as '
  "'module:Class' (docs/how_to/add_a_policy.md)."
)


def is_fixed(policy: str) -> bool:
  """Returns whether a policy has a fixed length of more than 0."""
  return policy.startswith((FIXED, ALWAYS))


def names(length: int) -> list[str]:
  """Returns the names of all own policies; drafts have `length` tokens."""
  fixed = f'{FIXED}{length}', f'{ALWAYS}{length}'
  return [NO_SPECULATION, *fixed, _TABLE, GOODPUT]


def needs_costs(name: str) -> bool:
  """Returns whether a policy cannot do without costs."""
  has_own = name in (NO_SPECULATION, GOODPUT)
  return not has_own and not is_fixed(name)


def make(
  name: str,
  buckets: StepBuckets,
  *,
  costs: cost_model.CostModel | None = None,
  table: BatchTable | None = None,
  is_tree: bool = False,
  drafts_by_model: bool = True,
) -> policies.Policy:
  """Returns a new policy.

  Args:
    name: see `HELP`.
    buckets: the declared sizes.
    costs: seconds of a step, for policies that need them; without them goodput
      learns them while it decodes.
    table: the policy that 'table' names.
    is_tree: drafts are trees.
    drafts_by_model: drafts take time, other than lookups.

  Raises:
    UserError: there is none of this name.
  """
  if name == NO_SPECULATION:
    return FixedLength()
  if name == _TABLE:
    return table
  if name == GOODPUT:
    return auto.make(
      buckets, is_tree=is_tree, drafts_by_model=drafts_by_model, costs=costs
    )
  if ':' in name:
    return loading.load(name, costs)
  kind, _, length = name.rpartition('_')
  if f'{kind}_' not in (FIXED, ALWAYS) or not length.isdecimal():
    raise errors.UserError(
      f'unknown policy {name!r}; choose from none, fixed_K, always_K, table, '
      "goodput and 'module:Class'"
    )
  if int(length) not in buckets.lengths:
    raise errors.UserError(
      f'policy {name} is none of the declared lengths {buckets.lengths}'
    )
  return FixedLength(int(length), drafts_first=name.startswith(ALWAYS))
