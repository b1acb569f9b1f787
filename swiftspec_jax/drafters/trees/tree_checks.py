"""Which models and sizes go together in a tree pipeline."""

from swiftspec_jax import errors
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.model import Model


def are_disjoint(target: Model, draft: Model) -> bool:
  """Whether the models have no device in common.

  Raises:
    UserError: they share a part of their devices only.
  """
  if draft.mesh == target.mesh:
    return False
  shared = set(target.mesh.devices.flat) & set(draft.mesh.devices.flat)
  if shared:
    raise errors.UserError(
      f'{target.name} and {draft.name} share {len(shared)} of their devices; '
      'load both with the same `devices` (serial mode) or without a common one '
      '(asynchronous mode)'
    )
  return True


def check_sizes(draft: Model, tree_config: TreeConfig) -> None:
  """Raises UserError if a size does not fit the draft."""
  if tree_config.branching > draft.config.num_logits:
    raise errors.UserError(
      f'branching={tree_config.branching} is more than the '
      f'{draft.config.num_logits} tokens that {draft.name} proposes'
    )
  window = draft.config.sliding_window
  if window is not None and window <= tree_config.num_cache_rows:
    raise errors.UserError(
      f'num_cache_rows={tree_config.num_cache_rows} must be less than the '
      f'sliding window of {window} of {draft.name}'
    )
