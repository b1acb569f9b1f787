"""Flags of measured costs, and the policies of an engine that need them."""

import pathlib
from collections.abc import Sequence

from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors, policies
from swiftspec_jax.cli.flags import engine_flags, modes, policy_names
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.policies.cost_model import storage
from swiftspec_jax.step.program_sizes import ProgramSizes

_COSTS = flags.DEFINE_string(
  'costs',
  None,
  'File of experiments.profile_costs, for the policies that need costs. The '
  'policy goodput learns them while it decodes, if there is none.',
)
_TABLE_ACCEPTANCE = flags.DEFINE_float(
  'table_acceptance',
  0.7,
  'Probability of acceptance that the policy by batch size is profiled for.',
  lower_bound=0.0,
  upper_bound=1.0,
)


def require(user: str) -> None:
  """Raises UserError if there are no costs, which `user` needs."""
  if _COSTS.value is None:
    raise errors.UserError(
      f'{user} needs --costs, a file of experiments.profile_costs'
    )


def check(names: Sequence[str]) -> None:
  """Raises UserError if costs are missing, or hold for other devices."""
  for name in names:
    if policy_names.needs_costs(name):
      require(f'policy {name}')


class Policies:
  """Makes policies for an engine.

  Attributes:
    costs: costs of its steps; None if no file was given.
  """

  def __init__(self, engine: Engine, target: ss.Model, declared: ProgramSizes):
    """Reads the costs.

    Raises:
      UserError: they were measured for something else.
    """
    self._buckets = declared.scheduler.buckets
    self.costs = self._table = None
    if _COSTS.value is not None:
      key = engine_flags.cost_key(engine, target, declared)
      self.costs = storage.load(pathlib.Path(_COSTS.value), key)
      acceptance = [_TABLE_ACCEPTANCE.value] * self._buckets.max_length
      self._table = BatchTable.profile(
        self.costs, self._buckets, acceptance, declared.contexts[0] // 2
      )

  def make(self, name: str) -> policies.Policy:
    """Returns a new policy."""
    mode = modes.MODES[engine_flags.mode()]
    return policy_names.make(
      name,
      self._buckets,
      costs=self.costs,
      table=self._table,
      is_tree=mode.makes_trees,
      drafts_by_model=mode.drafts_by_model,
    )


def files() -> list[str]:
  """Returns the paths of files that policies read."""
  return [] if _COSTS.value is None else [_COSTS.value]
