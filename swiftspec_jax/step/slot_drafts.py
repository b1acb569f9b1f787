"""Drafts of the rows of a step.

Legend: B rows of a view, U slots, K longest draft.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from swiftspec_jax import policies
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.step import stateless_drafter
from swiftspec_jax.tree import types


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Search:
  """A lookup in the texts that the step itself does.

  Attributes:
    drafter: lookup drafter, which finds the drafts.
    wanted: i32[U] most tokens for each slot, on the host.
  """

  drafter: stateless_drafter.StatelessDrafter
  wanted: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotDrafts:
  """Drafts of rows.

  Attributes:
    drafts: facts about them for the policy.
    chains: i32[U, K] by slot, on the host or on the devices; None where drafts
      are trees.
    trees: packed `types.TreeProposal` of the slots, on the host or on the
      devices; None where drafts are chains.
    prefills_draft: whether a chunk of late tokens was read before,
      see `DraftPrefill`.
    is_late: bool[B] rows without a draft, as their text is not read yet;
      None if there are none.
    search: lookup whose results are the chains or trees, and `num_found`; None
      where they are there.
    own_lengths: i64[B] tokens that the drafter takes for its own: those of
      `drafts`, and 0 for rows in which a grammar has put others between them;
      None if there are no grammars.
    num_found: i32[U] on the devices, where only these know how many tokens of
      the `lengths` of `drafts` there are; None where the host does.
  """

  drafts: policies.Drafts
  chains: types.Array | None = None
  trees: types.Array | None = None
  prefills_draft: bool = False
  is_late: np.ndarray | None = None
  search: Search | None = None
  own_lengths: np.ndarray | None = None
  num_found: jax.Array | None = None


def verdicts_of(report: np.ndarray | None) -> dict[str, Any]:
  """Returns what the draft reports, as fields of a step's record.

  Args:
    report: i32[U, 3], the last columns of `SlotDrafts.trees`: the nodes, the
      root included; the outcome of the verdict that each row has followed; and
      the draft forwards for which the target has waited.
  """
  if report is None:
    return {}
  _, outcomes, num_forwards = report[report[:, 1] != types.NO_OUTCOME].T
  return {
    'outcomes': np.bincount(outcomes, minlength=tree_lib.NUM_OUTCOMES),
    'num_forwards': int(num_forwards.max(initial=0)),
  }
