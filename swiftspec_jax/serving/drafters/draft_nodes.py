"""Drafts for people who want to see them.

Legend: U slots, K longest draft, T = K + 1 nodes.
"""

from collections.abc import Sequence

import jax
from flax import struct

from swiftspec_jax import requests
from swiftspec_jax.requests import DraftNode
from swiftspec_jax.step.slot_drafts import SlotDrafts


@struct.dataclass(frozen=True, kw_only=True)
class ShownDrafts:
  """What the host reads of drafts, if anybody asks; leading axes [U, ...].

  `parents` and `is_looked_up` are None where drafts are chains, `probs` is None
  where it is not known.
  """

  token_ids: jax.Array  # i32[K]
  parents: jax.Array | None  # i32[T]
  is_looked_up: jax.Array | None  # bool[T]
  probs: jax.Array | None  # f32[K]

  def nodes(
    self, length: int, accepted: Sequence[int], by_model: bool
  ) -> tuple[DraftNode, ...]:
    """Returns the draft tokens of one slot, whose arrays these are.

    Args:
      length: draft tokens that were verified.
      accepted: indices of accepted nodes; the root is 0.
      by_model: whether a model has drafted what did not come of a text.
    """
    nodes = []
    for node in range(1, length + 1):
      parent, is_looked_up = node - 1, False
      if self.parents is not None:
        parent = int(self.parents[node])
        is_looked_up = bool(self.is_looked_up[node])
      if parent < 0:  # a tree with fewer nodes than were asked for
        break
      nodes.append(
        DraftNode(
          token_id=int(self.token_ids[node - 1]),
          parent=parent - 1,
          source=requests.source_of(by_model and not is_looked_up),
          prob=None if self.probs is None else float(self.probs[node - 1]),
          is_accepted=node in accepted,
        )
      )
    return tuple(nodes)


def shown(drafts: SlotDrafts) -> ShownDrafts:
  """Returns what there is of the drafts of a step, where it is."""
  trees = drafts.trees
  return ShownDrafts(
    token_ids=drafts.token_ids,
    parents=None if trees is None else trees.parents,
    is_looked_up=None if trees is None else trees.is_looked_up,
    probs=drafts.probs,
  )
