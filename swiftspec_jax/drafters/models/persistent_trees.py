"""A draft model whose trees outlive the steps of an engine.

The trees of SwiftSpec (section 3.1) under continuous batching: after each
verdict what was right of a tree stays, and on devices of its own the draft
grows it while the target verifies. The draft has a contiguous row of its own
cache for each slot; the target's pages do not concern it, but for the features
that it may read there.

The texts lie on the target's devices, and news of them go to the draft without
the host, which may have read no verdict of late. It counts with the most tokens
that a row may have got. A row that was left out, or is new, reads its text in
chunks, beside the steps of the others. The last chunk comes right before its
first tree.

Legend: B rows of a view, U slots, K longest draft.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.engine_drafter import EngineDrafter, SlotTexts
from swiftspec_jax.drafters.models import feature_draft, model_spec
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.drafters.trees import forced_acceptance
from swiftspec_jax.drafters.trees.tree_draft_rows import (
  TreeDraftRows,
  are_disjoint,
)
from swiftspec_jax.models import attention
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import Request
from swiftspec_jax.scheduling.page_table import NO_PAGE
from swiftspec_jax.step import buckets
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import SlotDrafts

_NOT_READ = np.int64(2**40)  # tokens; more than any text has
# The kernels of CPUs do no work for padding, so chunks have one size there.
_NATIVE_CHUNKS = (128,)
_NATIVE_WIDTH = 4  # of trees; as many tokens were accepted as with eight
# The built-in draft then has 1.3 forwards a round for 3.8, and as many of its
# tokens are accepted.
_NATIVE_LEAF_MASS = 0.7


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentTrees(DraftSpec):
  """Drafter of an engine.

  Attributes:
    model: model that drafts, on the target's devices or on others.
    tree: sizes of the trees; `num_nodes` is one more than the longest declared
      draft.
  """

  makes_trees = True

  model: Model
  tree: TreeConfig

  def __post_init__(self):
    if self.tree.is_adaptive:
      raise errors.UserError(
        'is_adaptive=True has no effect in an engine, whose policy says how '
        'many nodes there are; leave it out'
      )
    _check_sizes(self.model, self.tree)

  @property
  def own_length(self) -> int:
    return self.tree.num_nodes - 1

  @property
  def looks_up(self) -> bool:
    return self.tree.prompt_lookup and self.tree.forced_acceptance is None

  def runs_ahead(self, target: Model) -> bool:
    return True

  def model_for(self, target: Model) -> Model:
    are_disjoint(target, self.model)
    feature_draft.check_lives(self.model)
    model_spec.check_fits(self.model, target)
    return self.model

  def make(self, setup: Setup) -> 'PersistentTreeDrafter':
    return PersistentTreeDrafter(self, setup)


def _check_sizes(draft: Model, tree_config: TreeConfig) -> None:
  """Raises UserError if a size does not fit the draft."""
  if tree_config.branching > draft.config.num_logits:
    raise errors.UserError(
      f'branching={tree_config.branching} is more than the '
      f'{draft.config.num_logits} tokens that {draft.name} proposes'
    )
  window = draft.config.sliding_window
  if window is not None and window <= tree_config.num_cache_rows:
    raise errors.UserError(
      f'num_cache_rows={tree_config.num_cache_rows} must be less than the '
      f'sliding window of {window} of {draft.name}'
    )


def _for_native_kernels(tree: TreeConfig, *, is_apart: bool) -> TreeConfig:
  """Returns sizes for CPUs, where each leaf and each forward takes time.

  A draft that `is_apart` grows its trees while the target verifies, and one
  whose acceptance is forced knows what is right.
  """
  if tree.width is None:
    tree = dataclasses.replace(tree, width=_NATIVE_WIDTH)
  is_forced = tree.forced_acceptance is not None
  if tree.min_leaf_mass is None and not (is_apart or is_forced):
    tree = dataclasses.replace(tree, min_leaf_mass=_NATIVE_LEAF_MASS)
  return tree


class PersistentTreeDrafter(EngineDrafter):
  """Decides when rows read, and what their trees send.

  Attributes:
    rows: the draft's rows, on its devices.
  """

  runs_ahead = True
  keeps_trees = True

  def __init__(self, draft: PersistentTrees, setup: Setup):
    """Allocates the cache.

    Args:
      draft: model, and sizes of its trees.
      setup: target, declared sizes and timeline.

    Raises:
      UserError: the trees are not as large as declared, or the models share a
        part of their devices.
    """
    config, model = setup.sizes.scheduler, draft.model
    is_native = attention.is_native(model.config, model.mesh)
    if is_native:
      is_apart = are_disjoint(setup.target.model, model)
      tree = _for_native_kernels(draft.tree, is_apart=is_apart)
      draft = dataclasses.replace(draft, tree=tree)
    tree = draft.tree
    if tree.num_nodes != config.buckets.max_length + 1:
      raise errors.UserError(
        f'num_nodes={tree.num_nodes} must be {config.buckets.max_length + 1}, '
        'one more than the longest declared draft'
      )
    self._draft = draft
    self._target = setup.target
    self._budget = config.buckets.max_query_tokens
    num_slots = config.buckets.max_rows
    self.rows = TreeDraftRows(model, tree, setup)
    chunks = _NATIVE_CHUNKS if is_native else buckets.CHUNKS
    budget = max(buckets.CHUNKS[0], self._budget)
    largest = min(budget, chunks[-1], self.rows.capacity)
    smaller = (size for size in chunks if size < largest)
    self._chunk_sizes = *smaller, largest
    num_pages = -(-config.max_context // config.page_size)
    self._no_pages = np.full((num_slots, num_pages), NO_PAGE, np.int32)
    self._max_context = config.max_context
    # By slot: who has it; tokens that the draft has read at least, the last of
    # which is the root; the most tokens after them; the step in which it read
    # or followed the text to its end; whether it has followed no verdict since;
    # and nodes that the last verdict was about.
    self._generations = np.zeros(num_slots, np.int64)
    self._num_read = np.zeros(num_slots, np.int64)
    self._num_missing = np.full(num_slots, _NOT_READ)
    self._read_steps = np.zeros(num_slots, np.int64)
    self._is_fresh = np.ones(num_slots, bool)
    self._num_sent = np.zeros(num_slots, np.int64)
    # What runs while the target verifies: chunks by slot, and growth.
    self._chunks: list[tuple[int, Callable[[], None]]] = []
    self._grows = False
    self._is_compiled = False

  @property
  def name(self) -> str:
    tree, mode = self._draft.tree, 'async' if self.rows.is_async else 'serial'
    name = f'{self._draft.model.name}_{mode}_{tree.num_leaves}_{tree.branching}'
    name += f'_{tree.num_draft_steps}_{tree.prompt_lookup:d}'
    return f'{name}_{tree.min_leaf_mass}' if tree.min_leaf_mass else name

  def num_unread_tokens(self, view: policies.StepView, texts: SlotTexts) -> int:
    is_new = self._generations != texts.slot_generations
    self._generations[:] = texts.slot_generations
    self._num_read[is_new], self._is_fresh[is_new] = 0, True
    self._num_missing[is_new] = _NOT_READ
    is_late = self._is_late(view) & (view.limits > 0)
    return int(self._num_unread(view)[is_late].sum())

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    late = np.flatnonzero(self._is_late(view) & (lengths > 0))
    if len(late):
      self._prefill(view, late, texts)
    is_late = self._is_late(view) & (lengths > 0)
    lengths = np.where(is_late, 0, lengths)
    drafts = self._target.without_drafts(lengths)
    if lengths.any():
      drafts = self._follow(view, lengths, texts)
    return dataclasses.replace(
      drafts,
      prefills_draft=bool(len(late)),
      is_late=is_late if is_late.any() else None,
    )

  def overlap(
    self, view: policies.StepView, drafted: np.ndarray, verified: np.ndarray
  ) -> None:
    self._num_sent[view.slots] = drafted
    self._num_missing[view.slots] += verified + 1
    for _, read in self._chunks:
      read()
    self._chunks = []
    if self._grows and self.rows.is_async:
      self.rows.grow()
    self._grows = False

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    rows = is_present & (self._read_steps[view.slots] <= view.step)
    rejected = np.where(rows, verified - accepted, 0)
    self._num_missing[view.slots] -= rejected

  def compiling(self) -> Self:
    twin = copy.copy(self)
    twin.rows = self.rows.compiling()
    twin._target = self._target.compiling()
    return twin

  def warm_up(self, flat: StepSizes) -> None:
    del flat  # the rows of the draft are always as many, and as long
    if self._is_compiled:
      return
    texts = self._target.texts(self._no_pages)
    starts = range(self._max_context)
    for size in self._chunk_sizes:
      for start in {self.rows.context(x, size): x for x in starts}.values():
        self.rows.chunk(0, start, size, texts)()
    self._put_text(0, (), Request(token_ids=()))
    self.rows.advance(texts, np.zeros(len(self._num_read), np.int32))
    if self.rows.is_async:
      self.rows.grow()
    self._is_compiled = True

  def trial(self, num_rows: int, num_known: int, length: int) -> None:
    budgets = np.zeros(len(self._num_read), np.int32)
    budgets[:num_rows] = length
    self.rows.begin_trial(num_rows, num_known)
    texts = self._target.texts(self._no_pages)
    jax.block_until_ready(self.rows.advance(texts, budgets, follows=False))

  def trial_prefill(self, num_rows: int, num_known: int) -> None:
    del num_rows  # one after the other
    size = self._chunk_sizes[-1]
    texts = self._target.texts(self._no_pages)
    read = self.rows.chunk(0, max(num_known - size, 0), size, texts)
    for _ in range(-(-self._budget // size)):
      read()
    jax.block_until_ready(self.rows.state)

  def _num_unread(self, view: policies.StepView) -> np.ndarray:
    """Returns i64[B], the most tokens that the draft has not read."""
    most = view.kv_lengths + 1 + view.num_ahead
    return most - self._num_read[view.slots]

  def _is_late(self, view: policies.StepView) -> np.ndarray:
    """Returns bool[B]: more is missing than what its tree can follow."""
    most = self._num_sent[view.slots] + 1
    most[self._is_fresh[view.slots]] = 0
    return self._num_missing[view.slots] > most

  def _note_read(self, view: policies.StepView, rows: np.ndarray) -> None:
    """Notes that the draft has read the texts of rows i64[r] to their ends."""
    slots = view.slots[rows]
    self._num_read[slots] = view.kv_lengths[rows] + 1
    self._num_missing[slots] = 0
    self._read_steps[slots] = view.step

  def _follow(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    """Enqueues proposals of `lengths` i64[B] nodes, after what is known."""
    rows = np.flatnonzero(lengths)
    budgets = np.zeros(len(self._num_read), np.int32)
    budgets[view.slots[rows]] = lengths[rows]
    trees = self.rows.advance(self._target.texts(texts.page_table), budgets)
    self._note_read(view, rows)
    self._is_fresh[view.slots[rows]] = False
    self._grows = True
    return SlotDrafts(
      drafts=policies.Drafts(lengths=lengths),
      trees=trees,
    )

  def _prefill(
    self, view: policies.StepView, rows: np.ndarray, texts: SlotTexts
  ) -> None:
    """Enqueues what late rows of the view read, the shortest rests first.

    The last chunk of a row is read now, others while the target verifies if the
    draft has devices of its own.
    """
    room, sizes = self._budget, self._chunk_sizes
    of_target = self._target.texts(texts.page_table)
    order = np.argsort(self._num_unread(view)[rows], kind='stable')
    for row in rows[order].tolist():
      slot, num_known = int(view.slots[row]), int(view.kv_lengths[row]) + 1
      if not self._num_read[slot]:
        known = texts.known_from(view, row, 0)
        self._put_text(slot, known, texts.requests[slot])
      most = self._num_unread(view)[row] + self._num_read[slot]
      while room > 0 and self._num_missing[slot]:
        # The last token that was read has no keys and values yet.
        start = max(int(self._num_read[slot]) - 1, 0)
        fitting = (size for size in sizes if size >= most - start)
        size = next(fitting, sizes[-1])
        is_last = most - start <= size
        if is_last and any(other == slot for other, _ in self._chunks):
          break
        read = self.rows.chunk(slot, start, size, of_target)
        if is_last or not self.rows.is_async:
          read()
        else:
          self._chunks.append((slot, read))
        if is_last:
          self._note_read(view, np.array([row]))
        else:
          self._num_read[slot] = min(start + size, num_known)
        room -= size
        self._is_fresh[slot] = True

  def _put_text(
    self, slot: int, known: Sequence[int], request: Request
  ) -> None:
    """Enqueues that a row is that of another request with `known` tokens."""
    reference = None
    if self._draft.tree.forced_acceptance is not None:
      reference = forced_acceptance.make_reference(
        request.token_ids + request.reference_token_ids,
        request.sampling.seed,
        self._max_context,
      )
    self.rows.put_text(slot, known, reference)
