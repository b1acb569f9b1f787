"""The part of a tree that goes to the target."""

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax import types
from swiftspec_jax.tree import arrays, state


@struct.dataclass(frozen=True, kw_only=True)
class Selection:
  """Connected nodes, most probable first: the root leads, padding is last."""

  token_ids: jax.Array  # i32[B, T] PLACEHOLDER_TOKEN_ID for padding
  parents: jax.Array  # i32[B, T] in the selection; NO_PARENT for padding
  depths: jax.Array  # i32[B, T]
  log_probs: jax.Array  # f32[B, T] -inf for padding
  is_looked_up: jax.Array  # bool[B, T]
  size: jax.Array  # i32[B]


def select(
  tree: state.DraftTree, num_nodes: int, budgets: jax.Array | None = None
) -> Selection:
  """Returns the most probable nodes, or all if there are fewer.

  Args:
    tree: tree to choose from.
    num_nodes: T, most nodes of a row, the root included.
    budgets: i32[B] most nodes of each row, the root left out; None for T - 1.
  """
  weights, indices = jax.lax.top_k(tree.nodes.log_probs, num_nodes)
  nodes = tree.nodes_at(indices)
  is_node = weights > -jnp.inf
  if budgets is not None:  # parents come first, so any first nodes are a tree
    is_node &= jnp.arange(num_nodes)[None] <= budgets[:, None]
  parents = arrays.last_of(nodes.parents[:, :, None] == indices[:, None])
  return Selection(
    token_ids=jnp.where(is_node, nodes.token_ids, types.PLACEHOLDER_TOKEN_ID),
    parents=jnp.where(is_node, parents, state.NO_PARENT),
    depths=jnp.where(is_node, nodes.depths, 0),
    log_probs=jnp.where(is_node, weights, -jnp.inf),
    is_looked_up=is_node & nodes.is_looked_up,
    size=arrays.count(is_node),
  )
