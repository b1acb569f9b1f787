"""New nodes: put after the old ones, then cut to the tree's capacity."""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, state

# Weights of a tree are raised by multiples of this. Sums of them are exact in
# float32, whatever their order, so that no child gets past its parent.
_QUANTUM = 2.0**-10


def widen(
  tree: state.DraftTree,
  token_ids: jax.Array,
  parents: jax.Array,
  depths: jax.Array,
  log_probs: jax.Array,
  *,
  is_looked_up: bool = False,
) -> state.DraftTree:
  """Returns the tree with candidates [B, X] after its N nodes.

  Those are too many: `fit` cuts the arrays to N again. `size` stays as it is.
  """

  def append(old, new):
    return jnp.concatenate([old, new], axis=1)

  def fill(old, value):
    return append(old, jnp.full(token_ids.shape, value, old.dtype))

  return tree.replace(
    token_ids=append(tree.token_ids, token_ids),
    parents=append(tree.parents, parents),
    depths=append(tree.depths, depths),
    log_probs=append(tree.log_probs, log_probs),
    cache_slots=fill(tree.cache_slots, state.NO_SLOT),
    is_looked_up=fill(tree.is_looked_up, is_looked_up),
  )


def fit(
  wide: state.DraftTree, is_new: jax.Array, capacity: int
) -> state.DraftTree:
  """Cuts a tree to its capacity, where the least probable candidates go.

  Args:
    wide: tree from `widen`.
    is_new: bool[B, X] new candidates that count.
    capacity: N.
  """
  is_old = jnp.arange(capacity)[None] < wide.size[:, None]
  is_node = jnp.concatenate([is_old, is_new], axis=1)
  is_kept = is_node & ~_surplus(wide, is_node, capacity)
  return state.keep(wide, is_kept, capacity)


def _surplus(wide, is_node, capacity):
  """Returns bool[B, N + X], the candidates without a place."""
  is_candidate = is_node & (wide.cache_slots == state.NO_SLOT)
  scores = jnp.where(is_candidate, -wide.log_probs, -jnp.inf)
  # Of equal weights the higher index goes first, and top_k prefers the lower.
  num_new = wide.capacity - capacity
  _, places = jax.lax.top_k(scores[:, ::-1], num_new)
  num_surplus = arrays.count(is_node) - capacity
  is_surplus = jnp.arange(num_new)[None] < num_surplus[:, None]
  none = jnp.zeros_like(is_node)
  return arrays.put(none, wide.capacity - 1 - places, is_surplus, is_surplus)


def raise_weights(
  tree: state.DraftTree,
  nodes: jax.Array,
  log_probs: jax.Array,
  is_used: jax.Array,
) -> state.DraftTree:
  """Makes nodes more probable, and with them all that hangs below.

  Args:
    tree: may have longer arrays of nodes than its capacity.
    nodes: i32[B, X].
    log_probs: f32[B, X] their log-probability after their parents, at most
      zero; it counts where it is better than that in the tree.
    is_used: bool[B, X].
  """
  parents = arrays.take(tree.parents, nodes)
  known = arrays.take(tree.log_probs, nodes) - arrays.take(
    tree.log_probs, parents
  )
  # Less than the true gain by at least what rounding can make of it.
  gains = jnp.maximum(jnp.floor((log_probs - known) / _QUANTUM - 0.5), 0.0)
  gains = arrays.put(
    jnp.zeros_like(tree.log_probs), nodes, gains * _QUANTUM, is_used
  )
  return tree.replace(log_probs=tree.log_probs + state.path_sums(tree, gains))


def round_down(log_probs: jax.Array) -> jax.Array:
  """Returns log-probabilities whose sums are exact."""
  return jnp.floor(log_probs / _QUANTUM) * _QUANTUM
