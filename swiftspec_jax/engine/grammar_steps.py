"""Steps of an engine in which outputs follow grammars.

The drafts of such rows come to the host, which adds what the grammar forces,
takes out what it forbids, and finds the masks of all nodes. So a row with a
grammar waits until its last step is read, and so do the rows beside it.

Legend: B rows of a view, U slots, K longest draft, T nodes of a slot in the
program, W words of a mask.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from swiftspec_jax import policies
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.engine.steps import Unread
from swiftspec_jax.requests import grammar
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step import slot_trees
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts
from swiftspec_jax.step.target import Target
from swiftspec_jax.tree import types

if TYPE_CHECKING:
  import llguidance

# Of rows of a view, or of slots.
Drafts = Mapping[int, grammar.Draft]


class GrammarSteps:
  """Drafts and masks of rows with a grammar; of nothing where there is none."""

  def __init__(self, target: Target, jobs: Mapping[int, Job]):
    """Has no step yet.

    Args:
      target: target of the engine.
      jobs: requests of the engine by their numbers.
    """
    self._target = target
    self._jobs = jobs
    self._drafts: dict[int, grammar.Draft] = {}  # of the step, by slot

  def num_forced(self, view: policies.StepView) -> np.ndarray:
    """Returns i64[B] tokens that are certain after the rows; begins a step."""
    self._drafts = {}
    counts = np.zeros(view.num_rows, np.int64)
    for row, matcher in self._matchers(view.slots, view.request_ids).items():
      counts[row] = len(grammar.forced(matcher))
    return np.minimum(counts, view.limits)

  def restrict(
    self, view: policies.StepView, drafts: SlotDrafts, room: np.ndarray
  ) -> SlotDrafts:
    """Returns drafts as grammars allow and lengthen them, on the host.

    Args:
      view: view of the step.
      drafts: drafts of a drafter.
      room: i64[B] most tokens of each row.
    """
    matchers = self._matchers(view.slots, view.request_ids)
    if not matchers:
      return drafts
    drafts = _on_host(view, drafts, self._target)
    token_ids, parents = _nodes(drafts)
    facts, found, vocabulary = drafts.drafts, {}, None
    if drafts.trees is not None:
      vocabulary = grammar.vocabulary_of(self._target.model)
    lengths, own_lengths = facts.lengths.copy(), facts.lengths.copy()
    for row, matcher in matchers.items():
      slot, count = int(view.slots[row]), facts.lengths[row]
      draft = grammar.draft(
        matcher,
        token_ids[slot, :count].tolist(),
        parents[slot, :count].tolist(),
        int(room[row]),
        vocabulary=vocabulary,
      )
      found[row] = self._drafts[slot] = draft
      lengths[row] = len(draft.token_ids)
      own_lengths[row] = 0 if -1 in draft.origins else lengths[row]
    if drafts.is_late is not None:
      is_late = drafts.is_late & (lengths == 0)
      drafts = dataclasses.replace(drafts, is_late=is_late)
    facts = dataclasses.replace(facts, lengths=lengths, **_moved(facts, found))
    return dataclasses.replace(
      _with_nodes(drafts, self._drafts), drafts=facts, own_lengths=own_lengths
    )

  def are_in(self, step: StepPlan) -> bool:
    """Returns whether a row that emits tokens has a grammar."""
    slots = step.slots[step.is_sampled]
    return bool(self._target.sampling.has_grammar[slots].any())

  def hold_up(self, unread: Unread) -> bool:
    """Returns whether a step has to be read before the next is enqueued."""
    if unread.has_grammar:
      logging.log_first_n(
        logging.INFO,
        'Steps with structured outputs are read before the next is enqueued, '
        'as its masks depend on their tokens; swiftspec:grammar_steps counts '
        'them.',
        1,
      )
    return unread.has_grammar

  def mask_finder(
    self, step: StepPlan, flat: StepSizes
  ) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
    """Returns what finds masks and index of a step; None without any."""
    if not self.are_in(step):
      return None
    masks, index = self._target.no_masks(flat)
    matchers = []
    for row, matcher in self._matchers(step.slots, step.request_ids).items():
      if step.is_sampled[row]:
        slot, nodes = int(step.slots[row]), [matcher]
        if slot in self._drafts:
          nodes = self._drafts[slot].matchers[: step.lengths[row] + 1]
        end = len(matchers) + len(nodes)
        index[slot, : len(nodes)] = range(len(matchers), end)
        matchers += nodes

    def find():
      grammar.fill_masks(masks, matchers)
      return masks, index

    return find

  def _matchers(
    self, slots: np.ndarray, request_ids: np.ndarray
  ) -> dict[int, 'llguidance.LLMatcher']:
    """Returns those of the rows in slots i64[B] that have a grammar."""
    rows = np.flatnonzero(self._target.sampling.has_grammar[slots]).tolist()
    return {i: self._jobs[int(request_ids[i])].matcher for i in rows}


def _on_host(
  view: policies.StepView, drafts: SlotDrafts, target: Target
) -> SlotDrafts:
  """Returns drafts that are found, in arrays that may be written."""
  if drafts.search is not None:
    chains, num_found = target.find(drafts.search)
    found = np.asarray(num_found)[view.slots]
    facts = drafts.drafts
    facts = dataclasses.replace(facts, lengths=np.minimum(facts.lengths, found))
    drafts = dataclasses.replace(
      drafts, drafts=facts, chains=chains, search=None
    )
  chains, trees = (
    x if x is None else np.array(x) for x in (drafts.chains, drafts.trees)
  )
  return dataclasses.replace(drafts, chains=chains, trees=trees)


def _nodes(drafts: SlotDrafts) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and parents i32[U, K] as `grammar.draft` takes them."""
  if drafts.trees is not None:
    nodes = types.TreeProposal.unpack(drafts.trees)
    return nodes.token_ids[:, 1:], nodes.parents[:, 1:] - 1
  steps = np.arange(drafts.chains.shape[1])
  return drafts.chains, np.broadcast_to(steps - 1, drafts.chains.shape)


def _with_nodes(drafts: SlotDrafts, found: Drafts) -> SlotDrafts:
  """Returns drafts of the host with other nodes in some slots."""
  if drafts.trees is not None:
    return dataclasses.replace(drafts, trees=_trees(drafts.trees, found))
  for slot, draft in found.items():
    drafts.chains[slot, : len(draft.token_ids)] = draft.token_ids
  return drafts


def _trees(packed: np.ndarray, drafts: Drafts) -> np.ndarray:
  """Returns a packed `types.TreeProposal` with the drafts of some slots."""
  old = types.TreeProposal.unpack(packed)
  token_ids, parents = old.token_ids.copy(), old.parents.copy()
  is_looked_up, log_probs = old.is_looked_up.copy(), old.log_probs.copy()
  for slot, draft in drafts.items():
    end = len(draft.token_ids) + 1
    origins = np.array(draft.origins, int)
    token_ids[slot, 1:end] = draft.token_ids
    parents[slot] = tree_lib.NO_PARENT
    parents[slot, 1:end] = np.array(draft.parents, int) + 1
    is_own, places = origins >= 0, origins + 1
    is_looked_up[slot, 1:end] = ~is_own | old.is_looked_up[slot, places]
    own = old.log_probs[slot, places]
    log_probs[slot, 1:end] = np.where(is_own, own, np.nan)
  return slot_trees.on_host(
    token_ids[:, 1:],
    parents,
    is_looked_up=is_looked_up,
    log_probs=log_probs,
    outcome=old.outcome,
    num_forwards=old.num_forwards,
  )


def _moved(facts: policies.Drafts, drafts: Drafts) -> dict[str, Any]:
  """Returns the confidences of `facts` where the tokens are now."""

  def move(values, *, of_paths):
    moved = values.copy()
    for row, draft in drafts.items():
      moved[:, row] = 0
      pairs = zip(draft.parents, draft.origins, strict=True)
      for i, (parent, origin) in enumerate(pairs):
        # What is forced is as certain as what it follows.
        above = moved[parent, row] if of_paths and parent >= 0 else 1.0
        moved[i, row] = values[origin, row] if origin >= 0 else above
    return moved

  confidences, of_nodes = facts.confidences, facts.node_confidences
  return {
    'confidences': None
    if confidences is None
    else move(confidences, of_paths=False),
    'node_confidences': of_nodes and (lambda: move(of_nodes(), of_paths=True)),
  }
