"""New nodes: put after the old ones, then cut to the tree's capacity."""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, state

# Weights of a tree are raised by multiples of this. Sums of them are exact in
# float32, whatever their order, so that no child gets past its parent.
_QUANTUM = 2.0**-10


def widen(tree: state.DraftTree, new: state.Nodes) -> state.DraftTree:
  """Returns the tree with new nodes [B, X] in places after its N.

  Those are too many: `fit` cuts the tree to its capacity again.
  """
  packed = jnp.concatenate([tree.packed, new.pack()], axis=1)
  return tree.replace(packed=packed)


def fit(wide: state.DraftTree, capacity: int) -> state.DraftTree:
  """Cuts a tree to its capacity, where the least probable candidates go."""
  # Else XLA works the weights out again in each comparison.
  wide = jax.lax.optimization_barrier(wide)
  nodes = wide.nodes
  is_candidate = nodes.is_node & (nodes.cache_slots == state.NO_SLOT)
  num_surplus = arrays.count(nodes.is_node) - capacity
  is_surplus = _least(nodes.log_probs, is_candidate, num_surplus, capacity)
  return state.keep(wide, nodes.is_node & ~is_surplus, capacity)


def _least(weights, is_candidate, counts, capacity):
  """Returns bool[B, N + X], the i32[B] least probable candidates."""
  # Of equal weights the later one goes first, and top_k prefers the earlier.
  scores = jnp.where(is_candidate, -weights, -jnp.inf)[:, ::-1]
  scores, places = jax.lax.top_k(scores, weights.shape[1] - capacity)
  last = counts[:, None] - 1
  least = -arrays.take(scores, last)
  place = weights.shape[1] - 1 - arrays.take(places, last)
  is_later = jnp.arange(weights.shape[1])[None] >= place
  is_least = (weights < least) | ((weights == least) & is_later)
  return is_least & is_candidate & (last >= 0)


def raise_weights(
  tree: state.DraftTree,
  nodes: jax.Array,
  log_probs: jax.Array,
) -> state.DraftTree:
  """Makes nodes more probable, and with them all that hangs below.

  Args:
    tree: tree that may have more places than its capacity.
    nodes: i32[B, X]; NO_NODE for none.
    log_probs: f32[B, X] their log-probability after their parents, at most
      zero; it counts where it is better than that in the tree.
  """
  known = tree.nodes_at(nodes)
  above = arrays.take(tree.nodes.log_probs, known.parents)
  # Less than the true gain by at least what rounding can make of it.
  gains = (log_probs - (known.log_probs - above)) / _QUANTUM - 0.5
  gains = jnp.maximum(jnp.floor(gains), 0.0) * _QUANTUM
  index = arrays.places_in(nodes, tree.capacity)
  gains = jnp.where(index < 0, 0.0, arrays.take(gains, index))
  raised = tree.nodes
  raised = raised.replace(
    log_probs=raised.log_probs + state.path_sums(tree, gains)
  )
  return tree.replace(packed=raised.pack())


def round_down(log_probs: jax.Array) -> jax.Array:
  """Returns log-probabilities whose sums are exact."""
  return jnp.floor(log_probs / _QUANTUM) * _QUANTUM
