"""Drafts of the rows of a step.

Legend: B rows of a view, U slots, K longest draft.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from swiftspec_jax import policies, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.step.slot_trees import SlotTrees


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotDrafts:
  """Drafts of rows.

  Attributes:
    drafts: facts about them for the policy.
    token_ids: i32[U, K] by slot, on the host or on the devices.
    trees: shapes of the trees; None where the drafts are chains.
    probs: f32[U, K] on the devices, what a draft model takes for the
      probability of each node; None where it is not known.
    takes_in: whether a chunk of late tokens was read before, see `Intake`.
    is_late: bool[B] rows without a draft, as their text is not read yet;
      None if there are none.
    report: i32[U, 3] on the devices, for persistent trees: the outcome of
      the verdict that each has followed, or NO_OUTCOME; the draft forwards for
      which the target has waited; and the nodes, the root included.
    num_found: i32[U] on the devices, where only these know how many tokens of
      the `lengths` of `drafts` there are; None where the host does.
  """

  drafts: policies.Drafts
  token_ids: np.ndarray | jax.Array
  trees: SlotTrees | None = None
  probs: jax.Array | None = None
  takes_in: bool = False
  is_late: np.ndarray | None = None
  report: jax.Array | None = None
  num_found: jax.Array | None = None


def verdicts_of(report: np.ndarray | None) -> dict[str, Any]:
  """Returns what `SlotDrafts.report` says, as fields of a step's record."""
  if report is None:
    return {}
  outcomes, num_forwards, _ = report[report[:, 0] != types.NO_OUTCOME].T
  return {
    'outcomes': np.bincount(outcomes, minlength=tree_lib.NUM_OUTCOMES),
    'num_forwards': int(num_forwards.max(initial=0)),
  }
