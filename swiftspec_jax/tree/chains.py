"""A continuation of the root that is added as a whole."""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, insertion, rerooting, state


def add_chain(
  tree: state.DraftTree, token_ids: jax.Array, log_probs: jax.Array
) -> state.DraftTree:
  """Adds a looked up chain after the root as candidates.

  Each token is below the one before it. What is in the tree already is not
  added again: of two log-probabilities the better one counts, and what hangs
  below moves with it. In a full tree the least probable candidates go.

  Args:
    tree: tree whose `chain_length` is more than D.
    token_ids: i32[B, D].
    log_probs: f32[B, D] of each token after those before it. A chain ends
      before the first token with probability zero (-inf).
  """
  is_node = arrays.all_up_to(log_probs > -jnp.inf)
  log_probs = insertion.round_down(jnp.where(is_node, log_probs, -jnp.inf))
  twins = rerooting.descend(tree, token_ids)
  twins = jnp.where(is_node, twins, state.NO_NODE)
  tree = insertion.raise_weights(tree, twins, log_probs)
  is_new = is_node & (twins == state.NO_NODE)
  # Below the last token that is in the tree, or below the root.
  num_twins = arrays.count(twins != state.NO_NODE)[:, None]
  root = jnp.full_like(twins[:, :1], state.ROOT_INDEX)
  path = jnp.concatenate([root, twins], axis=1)
  weights = arrays.take(tree.nodes.log_probs, arrays.take(path, num_twins))
  sums = jnp.cumsum(jnp.where(is_new, log_probs, 0.0), axis=1)
  steps = jnp.arange(token_ids.shape[1])[None]
  new = state.Nodes(
    token_ids=token_ids,
    parents=jnp.where(
      steps <= num_twins, path[:, :-1], tree.capacity + steps - 1
    ),
    depths=jnp.broadcast_to(steps + 1, token_ids.shape),
    log_probs=jnp.where(is_new, weights + sums, -jnp.inf),
    cache_slots=jnp.full_like(token_ids, state.NO_SLOT),
    is_looked_up=jnp.ones_like(is_new),
  )
  return insertion.fit(insertion.widen(tree, new), tree.capacity)
