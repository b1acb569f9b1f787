"""Trees of draft tokens for the slots of an engine.

The nodes of a row stand behind each other as the tokens of a chain would, in
the flat batch and in the pages, the last known token first. What differs is at
which position they are, which of each other they see, and that the accepted
ones have to be moved together. Parents stand before their children, so the
first nodes of a tree, however many, are a tree.

Legend: U slots, K longest draft, T = K + 1 nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax import tree as tree_lib


@struct.dataclass(frozen=True, kw_only=True)
class SlotTrees:
  """The last known tokens, and draft tokens as nodes 1 to K behind them."""

  parents: jax.Array  # i32[U, T] -1 for node 0 and padding
  depths: jax.Array  # i32[U, T]
  ancestor_mask: jax.Array  # bool[U, T, T]
  # bool[U, T] came of a text, where a model drafts the other nodes.
  is_looked_up: jax.Array


def of_parents(
  parents: jax.Array, is_looked_up: jax.Array | None = None
) -> SlotTrees:
  """Returns trees of parents i32[U, T] and sources bool[U, T]."""
  mask = tree_lib.ancestor_mask(parents)
  if is_looked_up is None:
    is_looked_up = jnp.zeros_like(parents, bool)
  return SlotTrees(
    parents=parents,
    depths=mask.sum(axis=2, dtype=jnp.int32) - 1,
    ancestor_mask=mask,
    is_looked_up=is_looked_up,
  )


def on_host(parents: np.ndarray) -> SlotTrees:
  """Returns the same of parents i32[U, T] on the host, with host arrays."""
  num_slots, num_nodes = parents.shape
  mask = np.broadcast_to(
    np.eye(num_nodes, dtype=bool), (num_slots, num_nodes, num_nodes)
  ).copy()
  slots = np.arange(num_slots)
  for node in range(1, num_nodes):
    above = parents[:, node]
    has_parent = (above != tree_lib.NO_PARENT)[:, None]
    mask[:, node] |= mask[slots, np.maximum(above, 0)] & has_parent
  depths = mask.sum(axis=2, dtype=np.int32) - 1
  return SlotTrees(
    parents=parents,
    depths=depths,
    ancestor_mask=mask,
    is_looked_up=np.zeros(parents.shape, bool),
  )
