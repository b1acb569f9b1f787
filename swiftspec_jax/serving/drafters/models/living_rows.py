"""What a draft model keeps for trees that outlive the steps of an engine.

The device's half of `living_trees`: the rows of the draft's cache, one for
each slot, and what can be enqueued for them.

Legend: U slots, K longest draft, T = K + 1 nodes, C tokens of a chunk, P pages,
Z tokens of one, H features.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import buckets, spec_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.drafting import catch_up, text_lookup, tree_draft
from swiftspec_jax.model import Model
from swiftspec_jax.serving.compilation import ahead_of_time
from swiftspec_jax.serving.drafters import slot_trees
from swiftspec_jax.serving.drafters.slot_trees import SlotTrees
from swiftspec_jax.serving.scheduling.page_table import NO_PAGE
from swiftspec_jax.serving.scheduling.scheduler import SchedulerConfig
from swiftspec_jax.serving.target.row_state import RowState
from swiftspec_jax.serving.target.target import Target
from swiftspec_jax.tree import arrays

# Tokens of a chunk, at least and at most.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 32, 512


@functools.partial(jax.jit, static_argnames=('page_size', 'num_nodes'))
def news_of(
  rows: RowState,
  num_read: jax.Array,
  follows: jax.Array,
  pages: jax.Array | None,
  page_table: jax.Array | None,
  *,
  page_size: int,
  num_nodes: int,
) -> tuple[types.PackedVerified, jax.Array]:
  """Returns what a draft has not read of the texts that it follows.

  Args:
    rows: texts of the slots.
    num_read: i32[U] tokens that the draft has read, at most T less.
    follows: bool[U].
    pages: [P, Z, H] of `PagedCache`; None if the draft reads no features.
    page_table: i32[U, any]; None if the draft reads no features.
    page_size: Z; static.
    num_nodes: T; static.

  Returns:
    News for the draft, and `num_read` afterwards.
  """
  places = num_read[:, None] + jnp.arange(num_nodes)[None]
  num_new = jnp.where(follows, rows.lengths - num_read, 0)
  verified = types.VerifiedTokens(
    token_ids=arrays.take(rows.token_ids, places), num_tokens=num_new
  ).pack()
  num_read = num_read + num_new
  if pages is None:
    return verified, num_read
  # Each token is read with the feature of the one before it.
  places = jnp.where(places < num_read[:, None], places - 1, -1)
  return (verified, _features_at(pages, page_table, places)), num_read


@functools.partial(jax.jit, static_argnames='size')
def read_at(
  rows: RowState,
  num_read: jax.Array,
  slot: jax.Array,
  start: jax.Array,
  pages: jax.Array | None,
  page_table: jax.Array | None,
  *,
  size: int,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
  """Returns a part of a text as `catch_up.read_row` takes it.

  Args:
    rows: texts of the slots.
    num_read: i32[U] tokens that the draft has read.
    slot: i32[].
    start: i32[] place of the part's first token.
    pages: same as in `news_of`.
    page_table: same as in `news_of`.
    size: C; static.

  Returns:
    i32[1, C + 2] tokens, `start`, and the place behind the last token; features
    [1, C, H] or None; and `num_read` afterwards.
  """
  places = start + jnp.arange(size)
  # An invented text, of which a time is measured, has no tokens.
  end = jnp.clip(rows.lengths[slot], start + 1, start + size)
  token_ids = rows.token_ids.at[slot, places].get(mode='fill', fill_value=0)
  chunk = jnp.concatenate([token_ids, jnp.stack([start, end])])[None]
  num_read = num_read.at[slot].set(end)
  if pages is None:
    return chunk, None, num_read
  places = jnp.where(places < end, places - 1, -1)[None]
  return chunk, _features_at(pages, page_table[slot][None], places), num_read


def _features_at(pages, page_table, positions):
  """Returns features bf16[r, n, H] at positions i32[r, n]; 0 at negative ones.

  Args:
    pages: [P, Z, H].
    page_table: i32[r, any] of the rows.
    positions: i32[r, n].
  """
  num_pages, page_size, _ = pages.shape
  found = arrays.take(page_table, positions // page_size)
  found = jnp.where(positions < 0, num_pages, found)
  features = pages.at[found, positions % page_size].get(
    mode='fill', fill_value=0
  )
  # Rounding costs a little acceptance at most, and halves what travels.
  return features.astype(jnp.bfloat16)


@jax.jit
def unpack(
  proposal: jax.Array, verified: types.PackedVerified
) -> tuple[jax.Array, SlotTrees, jax.Array, jax.Array]:
  """Returns a packed `TreeProposal` of all slots as an engine takes it.

  Args:
    proposal: i32[U, any].
    verified: news that the draft has followed.

  Returns:
    Tokens i32[U, K], the trees, the probabilities f32[U, K] of the nodes, and
    for the statistics i32[U, 2]: the outcome of that verdict, or NO_OUTCOME,
    and the draft forwards behind it.
  """
  proposal = types.TreeProposal.unpack(proposal)
  packed = verified[0] if isinstance(verified, tuple) else verified
  has_news = types.VerifiedTokens.unpack(packed).num_tokens > 0
  outcome = jnp.where(has_news, proposal.outcome, types.NO_OUTCOME)
  return (
    jnp.maximum(proposal.token_ids, 0)[:, 1:],
    slot_trees.of_parents(proposal.parents, proposal.is_looked_up),
    jnp.exp(proposal.log_probs)[:, 1:],
    jnp.stack([outcome, proposal.num_forwards], axis=1),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
  """A part of a text, on the draft's devices.

  Attributes:
    slot: index of the row in the draft's arrays.
    context: number of rows of the cache under the attention.
    chunk: i32[1, C + 2] of `read_at`.
    features: [1, C, H], or None.
  """

  slot: int
  context: int
  chunk: jax.Array
  features: jax.Array | None


class LivingRows:
  """Enqueues what the draft does; nothing here waits for a device.

  Attributes:
    state: the draft's cache and trees, on its devices.
    chunk_size: number of tokens of a chunk.
    is_async: whether the draft has devices of its own.
  """

  def __init__(
    self,
    model: Model,
    tree: TreeConfig,
    config: SchedulerConfig,
    target: Target,
    is_async: bool,
  ):
    """Allocates the cache.

    Args:
      model: model that drafts.
      tree: sizes of the trees.
      config: sizes of the engine.
      target: the engine's target; features and proposals are on its devices.
      is_async: whether the draft's devices are others than the target's.
    """
    self.is_async = is_async
    self._model, self._tree, self._config = model, tree, config
    self._target = target
    # What the host decides must not be compiled in.
    self._compiled_tree = dataclasses.replace(
      tree,
      num_draft_steps=0,
      num_restart_steps=0,
      waits_for_misses=False,
      min_leaf_mass=0.0,
    )
    self._call = ahead_of_time.call
    self._num_slots = config.buckets.max_rows
    # i32[U] tokens that the draft has read, on the target's devices.
    self._num_read = target.put(np.zeros(self._num_slots, np.int32))
    self.state = tree_draft.init(
      model.config,
      self._compiled_tree,
      model.dtype,
      batch_size=self._num_slots,
      capacity=config.max_context,
      mesh=model.mesh,
    )
    self._is_busy = np.zeros(self._num_slots, bool)
    steps = 0, tree.num_restart_steps
    if not is_async:  # the restart is a step, too
      steps = tree.num_draft_steps, max(tree.num_draft_steps - 1, 0)
    waits = tree.waits_for_misses or not is_async
    # On the devices, as they are the same in each round.
    self._advance_counts = self._put(tuple(map(np.int32, (*steps, waits))))
    self._num_draft_steps = self._put(np.int32(tree.num_draft_steps))
    self._min_mass = None
    if tree.min_leaf_mass:
      self._min_mass = self._put(np.float32(tree.min_leaf_mass))
    self._control_token_ids = tokenizer_lib.control_token_ids(model.tokenizer)
    self.chunk_size = min(
      max(_SMALLEST_CHUNK, config.buckets.max_query_tokens),
      _LARGEST_CHUNK,
      self.state.cache.capacity,
    )

  def compiling(self) -> 'LivingRows':
    """Returns a twin whose calls compile, and do nothing else."""
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin._target = self._target.compiling()
    twin.state = ahead_of_time.abstract(self.state)
    twin._num_read = ahead_of_time.abstract(self._num_read)
    return twin

  def warm_up(self) -> None:
    """Calls each program once."""
    page_table = self.no_pages()
    contexts = {
      self._context(start): start for start in range(self._config.max_context)
    }
    for start in contexts.values():
      self.read(self.chunk(0, start, page_table))
    self.put_text(0, ())
    nobody = np.zeros(self._num_slots, np.int32)
    self.advance(nobody, page_table)
    self.grow()

  def begin_trial(self, num_rows: int, num_known: int) -> None:
    """Pretends that the first rows know texts, whose trees are roots."""
    is_used = np.arange(self._num_slots) < num_rows
    kv_lengths = np.where(is_used, num_known - 1, 0).astype(np.int32)
    cache = self.state.cache.replace(kv_lengths=self._put(kv_lengths))
    self.state = self.state.replace(cache=cache)
    if not self.is_async:
      roots = np.zeros(self._num_slots, np.int32)
      tree = tree_draft.new_tree(self._compiled_tree, roots)
      self.state = self.state.replace(tree=self._put(tree))

  def no_pages(self) -> np.ndarray:
    """Returns a page table without pages."""
    num_columns = -(-self._config.max_context // self._config.page_size)
    return np.full((self._num_slots, num_columns), NO_PAGE, np.int32)

  def chunk(self, slot: int, start: int, page_table: np.ndarray) -> Chunk:
    """Enqueues that a part of a text goes to the draft.

    Args:
      slot: index of the row in the draft's arrays.
      start: place of its first token in the text, or behind it.
      page_table: i32[U, any].
    """
    start = min(start, self.state.cache.capacity - self.chunk_size)
    chunk, features, self._num_read = self._call(
      read_at,
      self._target.rows,
      self._num_read,
      *self._target.put((np.int32(slot), np.int32(start))),
      *self._feature_pages(page_table),
      size=self.chunk_size,
    )
    return Chunk(
      slot=slot,
      context=self._context(start),
      **self._to_draft({'chunk': chunk, 'features': features}),
    )

  def _context(self, start: int) -> int:
    """Returns rows of the cache under the attention of a chunk."""
    capacity = self.state.cache.capacity
    start = min(start, capacity - self.chunk_size)
    return buckets.context_of(start + self.chunk_size, capacity)

  def put_text(self, slot: int, token_ids: Sequence[int]) -> None:
    """Enqueues that lookups in a slot begin with a text."""
    row = text_lookup.make_row(
      self._tree, token_ids, self._config.max_context, self._control_token_ids
    )
    if row is not None:
      row, slot = self._put((row, np.int32(slot)))
      lookup = self._call(spec_step.insert_row, self.state.lookup, row, slot)
      self.state = self.state.replace(lookup=lookup)

  def read(self, chunk: Chunk) -> None:
    """Enqueues the draft's forward over a chunk."""
    self.state = self._call(
      catch_up.read_row,
      self._model.params,
      self.state,
      self._put(np.int32(chunk.slot)),
      chunk.chunk,
      chunk.features,
      config=self._model.config,
      tree_config=self._compiled_tree,
      context=chunk.context,
    )

  def advance(
    self,
    budgets: np.ndarray,
    page_table: np.ndarray,
    *,
    follows: bool = True,
  ) -> tuple[jax.Array, SlotTrees, jax.Array, jax.Array]:
    """Enqueues the next proposals; returns `unpack`'s, for the target.

    Args:
      budgets: i32[U] nodes to send, the root left out; 0 for rows to leave.
      page_table: i32[U, any].
      follows: whether the draft reads what is new in the texts before.
    """
    is_busy = budgets > 0
    if (is_busy != self._is_busy).any():
      self._is_busy = is_busy
      self.state = self.state.replace(is_busy=self._put(is_busy))
    verified, self._num_read = self._call(
      news_of,
      self._target.rows,
      self._num_read,
      self._target.put(is_busy & follows),
      *self._feature_pages(page_table),
      page_size=self._config.page_size,
      num_nodes=self._tree.num_nodes,
    )
    self.state, proposal = self._call(
      tree_draft.advance,
      self._model.params,
      self.state,
      self._to_draft(verified),
      *self._advance_counts,
      self._put(budgets),
      self._min_mass,
      config=self._model.config,
      tree_config=self._compiled_tree,
      num_nodes=self._tree.num_nodes,
    )
    proposal = ahead_of_time.replicate(proposal, self._target.model.mesh)
    return self._call(unpack, proposal, verified)

  def grow(self) -> None:
    """Enqueues the draft forwards that need no verdict, if it has devices."""
    if self.is_async:
      self.state, _ = self._call(
        tree_draft.grow,
        self._model.params,
        self.state,
        self._num_draft_steps,
        self._min_mass,
        config=self._model.config,
        tree_config=self._compiled_tree,
      )

  def _feature_pages(self, page_table: np.ndarray) -> tuple[Any, Any]:
    """Returns features and page table for a draft that reads features."""
    if not self._model.config.reads_features:
      return None, None
    return self._target.features, self._target.put(page_table.copy())

  def _to_draft(self, values: Any) -> Any:
    """Enqueues transfers to the draft's devices."""
    return jax.tree.map(
      lambda x: ahead_of_time.replicate(x, self._model.mesh), values
    )

  def _put(self, values: Any) -> Any:
    """Returns arrays on the draft's devices."""
    return sharding_lib.replicate(values, self._model.mesh)
