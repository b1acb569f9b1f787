"""Policies by name: the own ones, and classes that users write."""

import importlib

from swiftspec_jax import errors, policies
from swiftspec_jax.policies import cost_model


def load(name: str, costs: cost_model.CostModel) -> policies.Policy:
  """Returns a new policy of the class that 'module:Class' names.

  Args:
    name: module and class, as 'module:Class'.
    costs: model of the seconds of a step, the only argument of the class.

  Raises:
    UserError: there is no such module or class, it is no policy, or it does not
      take costs.
  """
  module_name, separator, class_name = name.partition(':')
  if not (module_name and separator and class_name):
    raise errors.UserError(
      f"{name!r} does not name a policy; give 'module:Class'"
    )
  try:
    module = importlib.import_module(module_name)
  except ImportError as error:
    raise errors.UserError(
      f'{name}: cannot import {module_name}: {error}; is its directory on '
      'PYTHONPATH?'
    ) from error
  found = getattr(module, class_name, None)
  if not isinstance(found, type):
    raise errors.UserError(f'{name}: {module_name} has no class {class_name}')
  if not issubclass(found, policies.Policy):
    raise errors.UserError(
      f'{name} is no policy: it must be a subclass of policies.Policy; see '
      'docs/how_to/add_a_policy.md'
    )
  with errors.explained(
    f'{name} cannot be made from a cost model: ', TypeError
  ):
    return found(costs)
