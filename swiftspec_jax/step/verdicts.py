"""What the target makes of the drafts of a step, on its way to the host.

Legend: U slots, T tokens or nodes of a slot, the last known token included.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = jax.Array | np.ndarray


@struct.dataclass(frozen=True, kw_only=True)
class TreePart:
  """What a verdict on a tree has besides."""

  path: Array  # i32[U, T] indices of root and accepted nodes, then anything
  is_looked_up: Array  # bool[U, T] whether the nodes of the path were


@struct.dataclass(frozen=True, kw_only=True)
class Verdicts:
  """Verdicts on the drafts of all slots.

  They go to the host as one array, because each transfer costs it time.
  """

  num_accepted: Array  # i32[U] draft tokens
  num_levels: Array  # i32[U] longest chain among those that were verified
  token_ids: Array  # i32[U, T] accepted tokens, the next one, then anything
  tree: TreePart | None  # None where drafts are chains, and in plain steps

  def pack(self) -> jax.Array:
    """Returns i32[U, 2 + T], of trees i32[U, 2 + 3 T]."""
    counts = jnp.stack([self.num_accepted, self.num_levels], axis=1)
    parts = [counts, self.token_ids]
    if self.tree is not None:
      parts += [self.tree.path, self.tree.is_looked_up.astype(jnp.int32)]
    return jnp.concatenate(parts, axis=1)

  @classmethod
  def unpack(cls, packed: Array, max_nodes: int) -> 'Verdicts':
    """Returns them without a copy.

    Args:
      packed: result of `pack`, its rows of some slots, or a single row.
      max_nodes: T of the largest step of the engine; trees have no other.
    """
    counts, rest = packed[..., :2], packed[..., 2:]
    tree = None
    if rest.shape[-1] > max_nodes:
      rest, path, is_looked_up = (
        rest[..., i * max_nodes : (i + 1) * max_nodes] for i in range(3)
      )
      tree = TreePart(path=path, is_looked_up=is_looked_up > 0)
    return cls(
      num_accepted=counts[..., 0],
      num_levels=counts[..., 1],
      token_ids=rest,
      tree=tree,
    )
