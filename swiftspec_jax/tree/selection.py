"""The part of a tree that goes to the target."""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, state, types


def select(
  tree: state.DraftTree, num_nodes: int, budgets: jax.Array | None = None
) -> types.TreeProposal:
  """Returns the most probable nodes, or all if there are fewer.

  They are connected, and the most probable ones come first.

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
  return types.TreeProposal.of_nodes(
    jnp.where(is_node, nodes.token_ids, types.PLACEHOLDER_TOKEN_ID),
    jnp.where(is_node, parents, types.NO_PARENT),
    jnp.where(is_node, nodes.depths, 0),
    log_probs=jnp.where(is_node, weights, -jnp.inf),
    is_looked_up=is_node & nodes.is_looked_up,
  )
