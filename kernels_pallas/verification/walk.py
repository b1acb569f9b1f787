"""What the kernels share: their limits, and the walk over the tree.

Kernels have no gather and no sort; a tree has few nodes, so that a comparison
of all with all does both. The walk is made of sums over [T, T] that have one
term that is not zero, so they are exact.

Legend: T nodes, padding included.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products, tiles
from kernels_pallas.verification import reference

FAR = 2**30  # more than any token id


def check(scores: jax.Array, *, most_nodes: int) -> None:
  """Raises NotImplementedError for scores [B, T, V] that a kernel cannot do."""
  products.check_dtype(scores.dtype, ['float32'])
  tiles.check_most(scores.shape[1], most_nodes, 'tokens')


def walk(
  choices: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  ancestor_mask: jax.Array,
  size: jax.Array,
  num_nodes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns what `reference.verify_tree` does of the choices.

  Args:
    choices: i32[T, 1] target's token after each node.
    token_ids: i32[1, T] tokens of the nodes.
    parents: i32[1, T] indices of the parents.
    ancestor_mask: i32[T, T], 1 where column is row or an ancestor of it.
    size: i32[] nodes that count.
    num_nodes: T of the arrays before they were padded.

  Returns:
    Tokens i32[1, T], number of accepted nodes i32[1, 1] and path i32[1, T].
  """
  shape = ancestor_mask.shape
  row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  node = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
  is_node = jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) < num_nodes
  is_parent = row == jnp.maximum(parents, 0)
  wanted = jnp.where(is_parent, choices, 0).sum(axis=0, keepdims=True)
  matches = (node == 0) | ((token_ids == wanted) & (node < size))
  misses = jnp.where(matches, 0, ancestor_mask).sum(axis=1, keepdims=True)
  is_accepted = (misses == 0) & is_node
  accepted = jnp.where(is_accepted, 1, 0)
  as_row = jnp.where(row == column, accepted, 0).sum(axis=0, keepdims=True)
  num_before = jnp.where(column < row, as_row, 0).sum(axis=1, keepdims=True)
  # At [i, k]: node i is the k-th accepted one.
  is_kth = is_accepted & (num_before == column)
  path = jnp.where(is_kth, row, 0).sum(axis=0, keepdims=True)
  tokens = jnp.where(is_kth, choices, 0).sum(axis=0, keepdims=True)
  num_accepted = as_row.sum(axis=1, keepdims=True) - 1
  is_output = node <= num_accepted
  return (
    jnp.where(is_output, tokens, reference.NO_TOKEN),
    num_accepted,
    path,
  )
