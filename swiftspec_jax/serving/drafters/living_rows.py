"""What a draft model keeps for trees that outlive the steps of an engine.

The device's half of `living_trees`: the rows of the draft's cache, one for
each slot, and what can be enqueued for them.

Legend: U slots, K longest draft, T = K + 1 nodes, C tokens of a chunk, P pages,
Z tokens of one, H features.
"""

import copy
import dataclasses
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
from swiftspec_jax.serving.scheduling.scheduler import SchedulerConfig
from swiftspec_jax.serving.target import flat_batch
from swiftspec_jax.serving.target.target import Target

# Tokens of a chunk, at least and at most.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 32, 512


@jax.jit
def features_at(pages: jax.Array, places: jax.Array) -> jax.Array:
  """Returns features bf16[..., H] of tokens.

  Args:
    pages: [P, Z, H] of `PagedCache`.
    places: i32[...] there; P * Z stands for none, whose features are 0.
  """
  flat = pages.reshape(-1, pages.shape[-1])
  found = flat.at[places].get(mode='fill', fill_value=0)
  # Rounding costs a little acceptance at most, and halves what travels.
  return found.astype(jnp.bfloat16)


@jax.jit
def unpack(
  proposal: jax.Array, has_news: jax.Array
) -> tuple[jax.Array, SlotTrees, jax.Array]:
  """Returns a packed `TreeProposal` of all slots as an engine takes it.

  Args:
    proposal: i32[U, any].
    has_news: bool[U] whether the draft followed a verdict for the slot.

  Returns:
    Tokens i32[U, K], the trees, and for the statistics i32[U, 2]: the outcome
    of that verdict, or NO_OUTCOME, and the draft forwards behind it.
  """
  proposal = types.TreeProposal.unpack(proposal)
  outcome = jnp.where(has_news, proposal.outcome, types.NO_OUTCOME)
  return (
    jnp.maximum(proposal.token_ids, 0)[:, 1:],
    slot_trees.of_parents(proposal.parents),
    jnp.stack([outcome, proposal.num_forwards], axis=1),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class News:
  """What a round tells the draft, by slot.

  Attributes:
    verified: i32[U, T + 1] packed `VerifiedTokens`.
    budgets: i32[U] nodes to send, the root left out; 0 for rows to leave.
    places: i32[U, T] of the features of the tokens before, in the target's
      pages.
  """

  verified: np.ndarray
  budgets: np.ndarray
  places: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
  """A part of a text for `catch_up.read_row`.

  Attributes:
    slot: index of the row in the draft's arrays.
    start: place of the chunk's first token in the text.
    end: place behind its last token.
    context: number of rows of the cache under the attention.
    token_ids: i32[1, C] tokens, padded to the size of a chunk.
    features: [1, C, H] features on the draft's devices, or None.
  """

  slot: int
  start: int
  end: int
  context: int
  token_ids: np.ndarray
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
    return twin

  def warm_up(self) -> None:
    """Calls each program once."""
    longest = self._config.max_context
    chunks = {}
    for start in range(longest):
      chunk = self.empty_chunk(start, longest)
      chunks.setdefault(chunk.context, chunk)
    for chunk in chunks.values():
      self.read(chunk)
    self.put_text(0, ())
    self.advance(self.no_news())
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

  def no_news(self) -> News:
    """Returns news without tokens, for no row."""
    num_nodes = self._tree.num_nodes
    return News(
      verified=np.zeros((self._num_slots, num_nodes + 1), np.int32),
      budgets=np.zeros(self._num_slots, np.int32),
      places=self._no_places(self._num_slots, num_nodes),
    )

  def places(self, page_table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns places i64[r, n] in the target's pages; of position -1 none.

    Args:
      page_table: i32[r, any] of rows.
      positions: i64[r, n].
    """
    rows = np.repeat(np.arange(len(positions)), positions.shape[1])
    config = self._config
    places = flat_batch.places_of(
      page_table, rows, positions.ravel(), config.page_size, config.num_pages
    )
    return places.reshape(positions.shape)

  def empty_chunk(self, start: int, num_known: int) -> Chunk:
    """Returns a chunk without tokens that begins at `start`, or before it."""
    size, capacity = self.chunk_size, self.state.cache.capacity
    start = min(start, capacity - size)
    return Chunk(
      slot=0,
      start=start,
      end=min(start + size, num_known),
      context=buckets.context_of(start + size, capacity),
      token_ids=np.zeros((1, size), np.int32),
      features=self._features(self._no_places(1, size)),
    )

  def chunk(
    self,
    slot: int,
    start: int,
    token_ids: Sequence[int],
    page_table: np.ndarray,
  ) -> Chunk:
    """Returns a chunk with tokens of a text, and their features.

    Args:
      slot: index of the row in the draft's arrays.
      start: place of its first token in the text, or behind it.
      token_ids: the whole text.
      page_table: i32[any] pages of the row.
    """
    chunk = self.empty_chunk(start, len(token_ids))
    token_ids = token_ids[chunk.start : chunk.end]
    padded = np.zeros_like(chunk.token_ids)
    padded[0, : len(token_ids)] = token_ids
    places = self._no_places(1, self.chunk_size)
    # Each token is read with the feature of the one before it.
    before = np.arange(chunk.start - 1, chunk.end - 1)[None]
    places[:, : len(token_ids)] = self.places(page_table[None], before)
    return dataclasses.replace(
      chunk, slot=slot, token_ids=padded, features=self._features(places)
    )

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
      *self._put((np.int32(chunk.slot), chunk.token_ids)),
      chunk.features,
      *self._put((np.int32([chunk.start]), np.int32([chunk.end]))),
      config=self._model.config,
      tree_config=self._compiled_tree,
      context=chunk.context,
    )

  def advance(self, news: News) -> tuple[jax.Array, SlotTrees, jax.Array]:
    """Enqueues the next proposals; returns `unpack`'s, for the target."""
    is_busy = news.budgets > 0
    if (is_busy != self._is_busy).any():
      self._is_busy = is_busy
      self.state = self.state.replace(is_busy=self._put(is_busy))
    verified, budgets = self._put((news.verified, news.budgets))
    features = self._features(news.places)
    self.state, proposal = self._call(
      tree_draft.advance,
      self._model.params,
      self.state,
      verified if features is None else (verified, features),
      *self._advance_counts,
      budgets,
      self._min_mass,
      config=self._model.config,
      tree_config=self._compiled_tree,
      num_nodes=self._tree.num_nodes,
    )
    proposal = ahead_of_time.replicate(proposal, self._target.model.mesh)
    has_news = self._target.put(news.verified[:, -1] > 0)
    return self._call(unpack, proposal, has_news)

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

  def _no_places(self, *shape: int) -> np.ndarray:
    config = self._config
    return np.full(shape, config.num_pages * config.page_size, np.int32)

  def _features(self, places: np.ndarray) -> jax.Array | None:
    """Enqueues a transfer of features of places i32[...], if any are read."""
    if not self._model.config.reads_features:
      return None
    pages = self._target.features
    found = self._call(features_at, pages, self._target.put(places))
    return ahead_of_time.replicate(found, self._model.mesh)

  def _put(self, values: Any) -> Any:
    """Returns arrays on the draft's devices."""
    return sharding_lib.replicate(values, self._model.mesh)
