"""Continuations of the root that are added as a whole."""

import jax
import jax.numpy as jnp

from swiftspec_jax.tree import arrays, insertion, rerooting, state


def add_chains(
  tree: state.DraftTree,
  token_ids: jax.Array,
  log_probs: jax.Array,
) -> state.DraftTree:
  """Adds looked up chains after the root as candidates.

  Each token is below the one before it.

  What chains have in common becomes one node, and what is in the tree already
  is not added again: of two log-probabilities the better one counts, and what
  hangs below moves with it. In a full tree the least probable candidates go.

  Args:
    tree: tree whose `chain_length` is more than D.
    token_ids: i32[B, C, D].
    log_probs: f32[B, C, D] of each token after those before it. A chain ends
      before the first token with probability zero (-inf).
  """
  token_ids, log_probs, is_node, leads = _trie(token_ids, log_probs)
  twins = jnp.where(is_node, rerooting.descend(tree, token_ids), state.NO_NODE)
  has_twin = twins != state.NO_NODE
  batch_size, num_chains, length = token_ids.shape

  def flat(values):
    return values.reshape(batch_size, -1)

  tree = insertion.raise_weights(tree, flat(twins), flat(log_probs))
  # Below the last token that is in the tree, or below the root.
  num_twins = has_twin.sum(axis=2, keepdims=True)
  depths = jnp.broadcast_to(jnp.arange(1, length + 1)[None, None], twins.shape)
  behind_root = jnp.concatenate(
    [jnp.full_like(twins[:, :, :1], state.ROOT_INDEX), twins[:, :, :-1]], axis=2
  )
  last_twin = arrays.take(
    jnp.concatenate([behind_root, twins[:, :, -1:]], axis=2), num_twins, axis=2
  )
  sums = jnp.cumsum(jnp.where(is_node & ~has_twin, log_probs, 0.0), axis=2)
  weights = arrays.take(tree.nodes.log_probs, last_twin[:, :, 0])
  # The chain's own node before, as the one of its leader.
  places = tree.capacity + leads * length + jnp.arange(length)[None, None]
  before = jnp.concatenate([places[:, :, :1], places[:, :, :-1]], axis=2)
  chains = jnp.arange(num_chains)[None, :, None]
  is_new = is_node & ~has_twin & (leads == chains)
  new = state.Nodes(
    token_ids=token_ids,
    parents=jnp.where(depths <= num_twins + 1, behind_root, before),
    depths=depths,
    log_probs=jnp.where(is_new, weights[:, :, None] + sums, -jnp.inf),
    cache_slots=jnp.full_like(token_ids, state.NO_SLOT),
    is_looked_up=jnp.ones_like(is_new),
  )
  wide = insertion.widen(tree, jax.tree.map(flat, new))
  return insertion.fit(wide, tree.capacity)


def _trie(token_ids, log_probs):
  """Finds what chains have in common.

  Returns:
    The tokens, the best log-probabilities of equal prefixes, where there are
    any bool[B, C, D], and the first chain i32[B, C, D] with the same prefix.
  """
  is_same = same_prefixes(token_ids, log_probs > -jnp.inf)
  best = jnp.max(
    jnp.where(is_same, log_probs[:, None], -jnp.inf), axis=2, initial=-jnp.inf
  )
  leads = jnp.argmax(is_same, axis=2).astype(jnp.int32)
  return token_ids, insertion.round_down(best), best > -jnp.inf, leads


def same_prefixes(token_ids: jax.Array, is_node: jax.Array) -> jax.Array:
  """Returns bool[B, C, C, D], whether two chains are equal up to a token.

  Args:
    token_ids: i32[B, C, D].
    is_node: bool[B, C, D] which of the tokens count, up to the first that
      does not.
  """
  is_equal = token_ids[:, :, None] == token_ids[:, None]
  is_equal &= is_node[:, :, None] & is_node[:, None]
  return arrays.all_up_to(is_equal)
