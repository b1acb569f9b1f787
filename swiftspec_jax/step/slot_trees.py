"""Trees of draft tokens for the slots of an engine.

The nodes of a row stand one after another as the tokens of a chain would, in
the flat batch and in the pages, the last known token first. What differs is at
which position they are, which of each other they see, and that the accepted
ones have to be moved together. Parents stand before their children, so the
first nodes of a tree, however many, are a tree.

Legend: U slots, K longest draft, T = K + 1 nodes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax import tree as tree_lib
from swiftspec_jax.tree import types


@struct.dataclass(frozen=True, kw_only=True)
class SlotTrees:
  """The last known tokens, and draft tokens as nodes 1 to K after them."""

  parents: jax.Array  # i32[U, T] -1 for node 0 and padding
  depths: jax.Array  # i32[U, T]
  ancestor_mask: jax.Array  # bool[U, T, T]
  # bool[U, T] came of a text, where a model drafts the other nodes.
  is_looked_up: jax.Array


@jax.jit
def of_proposal(
  packed: jax.Array,
) -> tuple[jax.Array, SlotTrees]:
  """Returns what a packed `types.TreeProposal` i32[U, 5 T + 3] says.

  Returns:
    Draft tokens i32[U, K], and the trees.
  """
  proposal = types.TreeProposal.unpack(packed)
  token_ids = jnp.maximum(proposal.token_ids, 0)[:, 1:]
  mask = tree_lib.ancestor_mask(proposal.parents)
  trees = SlotTrees(
    parents=proposal.parents,
    depths=proposal.depths,
    ancestor_mask=mask,
    is_looked_up=proposal.is_looked_up,
  )
  return token_ids, trees


def of_chains(chains: types.Array, *, is_looked_up: bool = True) -> types.Array:
  """Returns chains i32[U, K] as a packed `types.TreeProposal`.

  They end where a token is `types.PLACEHOLDER_TOKEN_ID`. `is_looked_up` says
  whether they came of a text.
  """
  xp = jnp if isinstance(chains, jax.Array) else np
  num_slots, length = chains.shape
  is_token = chains != types.PLACEHOLDER_TOKEN_ID
  places = xp.arange(length, dtype=np.int32)
  parents = xp.where(is_token, places, np.int32(tree_lib.NO_PARENT))
  depths = xp.where(is_token, places + 1, 0)
  pad = functools.partial(xp.pad, pad_width=((0, 0), (1, 0)))
  return types.TreeProposal.of_nodes(
    pad(chains),
    pad(parents, constant_values=tree_lib.NO_PARENT),
    pad(depths),
    is_looked_up=xp.full((num_slots, length + 1), is_looked_up),
  ).pack()


of_chains_on_devices = jax.jit(of_chains)


def on_host(
  token_ids: np.ndarray, parents: np.ndarray, **facts: np.ndarray
) -> np.ndarray:
  """Returns a packed `types.TreeProposal` of the host.

  Args:
    token_ids: i32[U, K] draft tokens.
    parents: i32[U, T] of the nodes, parents first.
    **facts: further fields of the proposal.
  """
  depths = np.zeros_like(parents)
  slots = np.arange(len(parents))
  for node in range(1, parents.shape[1]):
    parent = parents[:, node]
    below = depths[slots, np.maximum(parent, 0)] + 1
    depths[:, node] = np.where(parent != tree_lib.NO_PARENT, below, 0)
  return types.TreeProposal.of_nodes(
    np.pad(token_ids, ((0, 0), (1, 0))), parents, depths, **facts
  ).pack()
