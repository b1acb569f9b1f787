"""The rows of a draft model whose trees outlive the rounds of an engine.

Each row of the target has one of the draft's own cache, with its tree. The
texts lie on the target's devices, and what is new of them goes to the draft
without the host, which may have read no verdict of late.

Legend: U rows, T = K + 1 nodes, C tokens of a chunk.
"""

import copy
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.drafters.texts import text_lookup
from swiftspec_jax.drafters.trees import forced_acceptance, read_row, tree_draft
from swiftspec_jax.models import attention
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding as sharding_lib
from swiftspec_jax.runtime import timeline as timeline_lib
from swiftspec_jax.step import ahead_of_time, buckets, unread_tokens
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step.unread_tokens import Texts

_NUM_CACHED = 256  # arrays of counts that are kept on the devices


def are_disjoint(target: Model, draft: Model) -> bool:
  """Whether the models have no device in common.

  Raises:
    UserError: they share a part of their devices only.
  """
  if draft.mesh == target.mesh:
    return False
  shared = set(target.mesh.devices.flat) & set(draft.mesh.devices.flat)
  if shared:
    raise errors.UserError(
      f'{target.name} and {draft.name} share {len(shared)} of their devices; '
      'load both with the same `devices` (serial mode) or without a common one '
      '(asynchronous mode)'
    )
  return True


class TreeDraftRows:
  """Enqueues what the draft does; nothing here waits for a device.

  Attributes:
    state: the draft's cache and trees, on its devices.
    is_async: whether the draft has devices of its own.
    max_context: tokens that prompt and output can have together.
  """

  def __init__(self, model: Model, tree: TreeConfig, setup: Setup):
    """Allocates the cache.

    Args:
      model: model that drafts.
      tree: sizes of the trees.
      setup: target, on whose devices texts and proposals are, declared sizes
        and timeline.

    Raises:
      UserError: the models share a part of their devices only.
    """
    self._model, self._tree = model, tree
    config, target = setup.sizes.scheduler, setup.target.model
    num_rows = config.buckets.max_rows
    self.is_async = are_disjoint(target, model)
    self._target_mesh = target.mesh
    # What the host decides must not be compiled in.
    self._compiled_tree = dataclasses.replace(
      tree,
      num_draft_steps=0,
      num_restart_steps=0,
      waits_for_misses=False,
      min_leaf_mass=0.0,
    )
    self.max_context = config.max_context
    self._timeline = setup.timeline
    self._call = operator.call
    self.state = tree_draft.init(
      model.config,
      self._compiled_tree,
      model.dtype,
      batch_size=num_rows,
      capacity=self.max_context,
      mesh=model.mesh,
    )
    self._is_busy = np.zeros(num_rows, bool)
    # i32[U] tokens that the draft has read, on the target's devices.
    self._num_read = sharding_lib.replicate(
      np.zeros(num_rows, np.int32), target.mesh
    )
    self._array = functools.lru_cache(maxsize=_NUM_CACHED)(_array)
    # Models have up to thousands of them, too many to list for each request.
    self._control_token_ids = [*tokenizer_lib.special_tokens(model.tokenizer)]

  @property
  def capacity(self) -> int:
    """Tokens of a row of the cache; some are for trees."""
    return self.state.cache.capacity

  def compiling(self) -> 'TreeDraftRows':
    """Returns a twin whose calls compile, and do nothing else."""
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin.state = ahead_of_time.abstract(self.state)
    twin._num_read = ahead_of_time.abstract(self._num_read)
    return twin

  def begin_trial(self, num_rows: int, num_known: int) -> None:
    """Pretends that the first rows know texts.

    Where the draft takes turns with the target, their trees are roots.
    """
    num_all = len(self._is_busy)
    self._set_busy(np.arange(num_all) < num_rows)
    kv_lengths = np.where(self._is_busy, num_known - 1, 0).astype(np.int32)
    cache = self.state.cache.replace(kv_lengths=self._put(kv_lengths))
    self.state = self.state.replace(cache=cache)
    if not self.is_async:
      roots = np.zeros(num_all, np.int32)
      tree = tree_draft.new_tree(self._compiled_tree, roots)
      self.state = self.state.replace(tree=self._put(tree))

  def put_text(
    self,
    slot: int,
    token_ids: Sequence[int],
    reference: forced_acceptance.Reference | None = None,
  ) -> None:
    """Enqueues that a row is that of another text.

    Args:
      slot: index of the row.
      token_ids: text in which lookups begin.
      reference: known text, where acceptance is forced.
    """
    lookup = text_lookup.make_row(
      self._tree, token_ids, self.max_context, self._control_token_ids
    )
    new = {'lookup': lookup, 'reference': reference}
    new = {name: row for name, row in new.items() if row is not None}
    if new:
      old = {name: getattr(self.state, name) for name in new}
      put = self._call(
        rows_lib.insert_row, old, *self._put((new, np.int32(slot)))
      )
      self.state = self.state.replace(**put)

  def chunk(
    self, slot: int, start: int, size: int, texts: Texts
  ) -> Callable[[], None]:
    """Enqueues that a part of a text goes to the draft.

    Args:
      slot: index of the row.
      start: place of its first token in the text, or after it.
      size: C.
      texts: texts of the target.

    Returns:
      A function that enqueues the draft's forward over it.
    """
    start = self._start(start, size)
    chunk, features, self._num_read = self._call(
      unread_tokens.read_at,
      texts,
      self._num_read,
      *sharding_lib.replicate(
        (np.int32(slot), np.int32(start)), self._target_mesh
      ),
      size=size,
    )
    chunk, features = self._send('text', (chunk, features))

    def read():
      self.state = self._call(
        read_row.read_row,
        self._model.params,
        self.state,
        self._put(np.int32(slot)),
        chunk,
        features,
        config=self._model.config,
        tree_config=self._compiled_tree,
        context=self.context(start, size),
      )

    return read

  def context(self, start: int, size: int) -> int:
    """Returns rows of the cache under the attention of a chunk.

    All where attention reads none but those that it needs.
    """
    if attention.is_native(self._model.config, self._model.mesh):
      return self.capacity
    end = self._start(start, size) + size
    return buckets.context_of(end, self.capacity)

  def _start(self, start: int, size: int) -> int:
    return min(start, self.capacity - size)

  def advance(
    self,
    texts: Texts,
    budgets: np.ndarray,
    *,
    follows: bool = True,
  ) -> jax.Array:
    """Enqueues that the trees follow the texts, and the next proposals.

    Args:
      texts: texts of the target.
      budgets: i32[U] most nodes to send, the root left out; 0 for rows that
        stay as they are.
      follows: whether the draft reads what is new in the texts before.

    Returns:
      The packed `TreeProposal`, on the target's devices.
    """
    is_busy = budgets > 0
    if (is_busy != self._is_busy).any():
      self._set_busy(is_busy)
    verified, self._num_read = self._call(
      unread_tokens.unread_of,
      texts,
      self._num_read,
      self._array(tuple(is_busy & follows), bool, self._target_mesh),
      num_nodes=self._tree.num_nodes,
    )
    received = self._send('verdict', verified, 'verify')
    run, counts = tree_draft.take_turn, ()
    statics = {'num_steps': self._tree.num_turn_steps}
    if self.is_async:
      run, statics = tree_draft.advance, {}
      # Without any tree the target waits in either case.
      wait_from = 1 if self._tree.waits_for_misses else is_busy.sum()
      counts = self._tree.num_restart_steps, wait_from
    dispatched = time.perf_counter()
    self.state, proposal = self._call(
      run,
      self._model.params,
      self.state,
      received,
      *map(self._count, counts),
      self._array(tuple(budgets.tolist()), np.int32, self._model.mesh),
      self._mass(),
      config=self._model.config,
      tree_config=self._compiled_tree,
      num_nodes=self._tree.num_nodes,
      **statics,
    )
    self._note('advance', dispatched, proposal, 'verdict')
    dispatched = time.perf_counter()
    proposal = ahead_of_time.replicate(proposal, self._target_mesh)
    self._note(
      'proposal', dispatched, proposal, 'advance', timeline_lib.TRANSFER
    )
    return proposal

  def grow(self) -> jax.Array:
    """Enqueues draft forwards that need no verdict.

    Returns:
      i32[] forwards that run, on the draft's devices.
    """
    dispatched = time.perf_counter()
    self.state, num_forwards = self._call(
      tree_draft.grow,
      self._model.params,
      self.state,
      self._count(self._tree.num_draft_steps),
      self._mass(),
      config=self._model.config,
      tree_config=self._compiled_tree,
    )
    self._note('grow', dispatched, num_forwards)
    return num_forwards

  def _set_busy(self, is_busy: np.ndarray) -> None:
    self._is_busy = is_busy.copy()
    # A copy of its own, as the state is donated.
    self.state = self.state.replace(is_busy=self._put(self._is_busy))

  def _send(self, name: str, values: Any, after: str | None = None) -> Any:
    """Enqueues transfers to the draft's devices."""
    dispatched = time.perf_counter()
    values = jax.tree.map(
      lambda x: ahead_of_time.replicate(x, self._model.mesh), values
    )
    self._note(name, dispatched, values, after, timeline_lib.TRANSFER)
    return values

  def _count(self, value: int) -> jax.Array:
    return self._array(int(value), np.int32, self._model.mesh)

  def _mass(self) -> jax.Array | None:
    """Returns the probability that leaves must hold; None for no limit."""
    least = self._tree.min_leaf_mass
    if not least:
      return None
    return self._array(round(least, 3), np.float32, self._model.mesh)

  def _put(self, values: Any) -> Any:
    """Returns arrays on the draft's devices."""
    return sharding_lib.replicate(values, self._model.mesh)

  def _note(
    self, name, dispatched, marker, after=None, track=timeline_lib.DRAFT
  ) -> None:
    if self._timeline is not None:
      marker = jax.tree.leaves(marker)[-1]
      self._timeline.program(track, name, dispatched, marker, after)


def _array(values, dtype, mesh: Mesh) -> jax.Array:
  """Returns an array of the host on the devices; most come again and again."""
  return sharding_lib.replicate(np.array(values, dtype), mesh)
