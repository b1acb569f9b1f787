"""Sample and match on a tree in plain JAX: what the kernels follow.

Legend: B rows, T nodes of the tree, V vocabulary.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.vocabulary import largest

# Implementations must give equal numbers.
TOLERANCES: dict[str, float] = {}

NO_TOKEN = -1  # fills tokens after the last output


def verify_tree(
  scores: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  sizes: jax.Array,
  ancestor_mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Chooses a token after each node and follows the nodes that are chosen.

  The arguments are those of `api.verify_tree`.
  """
  choices = largest.argmax(scores).astype(jnp.int32)
  found = follow(choices, token_ids, parents, sizes, ancestor_mask)
  return *found, choices


def follow(
  choices: jax.Array,
  token_ids: jax.Array,
  parents: jax.Array,
  sizes: jax.Array,
  ancestor_mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Does so with choices i32[B, T] that are made already."""
  num_nodes = choices.shape[1]
  wanted = jnp.take_along_axis(choices, jnp.maximum(parents, 0), axis=1)
  nodes = jnp.arange(num_nodes)[None]
  is_node = nodes < sizes[:, None]
  matches = (nodes == 0) | ((token_ids == wanted) & is_node)
  # Siblings differ, so that the nodes whose ancestors match are one path.
  is_accepted = ~jnp.any(ancestor_mask & ~matches[:, None], axis=2)
  num_accepted = is_accepted.sum(axis=1, dtype=jnp.int32) - 1
  # An accepted node lies on the path where its depth says.
  depths = ancestor_mask.sum(axis=2, dtype=jnp.int32) - 1
  is_place = is_accepted[:, None] & (depths[:, None] == nodes[:, :, None])
  path = jnp.where(is_place, nodes[:, None], 0).sum(axis=2, dtype=jnp.int32)
  is_output = nodes <= num_accepted[:, None]
  output = jnp.take_along_axis(choices, path, axis=1)
  return jnp.where(is_output, output, NO_TOKEN), num_accepted, path
