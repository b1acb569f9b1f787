"""Drafts for people who want to see them.

Legend: T nodes.
"""

from collections.abc import Sequence

import numpy as np

from swiftspec_jax import requests
from swiftspec_jax.requests import DraftNode
from swiftspec_jax.tree import types


def of_tree(
  packed: np.ndarray, length: int, accepted: Sequence[int], *, by_model: bool
) -> tuple[DraftNode, ...]:
  """Returns the nodes of a tree, its root left out.

  Args:
    packed: i32[5 T + 3], a row of a packed `types.TreeProposal`.
    length: draft tokens that were verified.
    accepted: indices of accepted nodes; the root is 0.
    by_model: whether a model has drafted what did not come of a text.
  """
  tree = types.TreeProposal.unpack(packed[None])
  nodes = []
  # A tree may have fewer nodes than were asked for.
  for node in range(1, min(length + 1, int(tree.size[0]))):
    is_looked_up = bool(tree.is_looked_up[0, node])
    log_prob = float(tree.log_probs[0, node])
    nodes.append(
      DraftNode(
        token_id=int(tree.token_ids[0, node]),
        parent=int(tree.parents[0, node]) - 1,
        source=requests.source_of(by_model and not is_looked_up),
        prob=None if np.isnan(log_prob) else float(np.exp(log_prob)),
        is_accepted=node in accepted,
      )
    )
  return tuple(nodes)
