"""A draft model that drafts a block in one forward, for the rows of an engine.

DFlash (arXiv 2602.06036). The block is the last known token with masks behind
it, which all see each other. What each layer sees of the text are keys and
values of the target's features; those stay in the pages of the draft, under the
numbers of the target's. Those of the block go to spare pages and are dropped.
The block is always whole, as in training, however few of its tokens are wanted.

Its tokens do not know of each other, so that a tree takes no more forwards than
a chain: below each node are the best tokens of the next place.

Legend: B rows of a view, R rows, N tokens, U slots, K longest draft, T = K + 1
nodes, b tokens of a block, D places that are drafted for, V vocabulary, V' of
it what the draft can propose, S spare pages of a row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from swiftspec_jax import errors, policies
from swiftspec_jax import sampling as sampling_lib
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.drafting import text_lookup
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.drafters.engine_drafter import SlotDrafts, SlotTexts
from swiftspec_jax.serving.drafters.models import draft_tree
from swiftspec_jax.serving.drafters.models.draft_forward import (
  DraftRows,
  noise_of_outputs,
)
from swiftspec_jax.serving.drafters.models.draft_tree import Grown, TreeDrafter
from swiftspec_jax.serving.drafters.models.model_drafter import ModelDrafter
from swiftspec_jax.serving.target import choices, flat_batch, paged_forward
from swiftspec_jax.serving.target.flat_batch import FlatBatch, FlatSizes
from swiftspec_jax.serving.target.target import Target


@struct.dataclass(frozen=True, kw_only=True)
class Context:
  """Verified tokens whose features are read."""

  pages: jax.Array  # features of the target, [P, Z, H] of `PagedCache`
  positions: jax.Array  # i32[N]
  # i32[N] there, and in the draft's pages, whose number for none is larger.
  places: jax.Array


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def take_in(
  params: Params,
  cache: paged.PagedCache,
  context: Context,
  *,
  config: ModelConfig,
) -> paged.PagedCache:
  """Writes what the layers see of verified tokens.

  Args:
    params: parameters of the draft.
    cache: donated.
    context: tokens to read.
    config: configuration of the draft; static.
  """
  flat = context.pages.reshape(-1, context.pages.shape[-1])
  features = flat.at[context.places].get(mode='fill', fill_value=0)
  keys, values = decoder.keys_and_values(
    params, config, features[None], context.positions[None]
  )

  def written(pages, new):
    return paged.write(pages, new[0], context.places)

  return cache.replace(
    keys=list(map(written, cache.keys, keys)),
    values=list(map(written, cache.values, values)),
  )


@functools.partial(
  jax.jit, static_argnames=('config', 'length'), donate_argnames='cache'
)
def block_logits(
  params: Params,
  cache: paged.PagedCache,
  context: Context,
  token_ids: jax.Array,
  rows: DraftRows,
  *,
  config: ModelConfig,
  length: int,
) -> tuple[paged.PagedCache, jax.Array]:
  """Reads the rest of the verified tokens, and runs a block of each row.

  Args:
    params: parameters of the draft.
    cache: donated.
    context: tokens that the cache lacks.
    token_ids: i32[R] last known tokens.
    rows: rows to draft for; the table of each ends in spare pages.
    config: configuration of the draft; static.
    length: D; static.

  Returns:
    The cache, and logits f32[R, D, V'] of the draft's output vocabulary.
  """
  cache = take_in(params, cache, context, config=config)
  hidden, cache = paged_forward.forward(
    params,
    config,
    *_block(token_ids, rows, cache, config),
    cache,
  )
  hidden = hidden.reshape(len(token_ids), config.block.size, -1)
  drafted = hidden[:, 1 : length + 1]
  return cache, decoder.unembed(params, config, drafted)


def _block(token_ids, rows, cache, config):
  """Returns the tokens i32[R * b] of blocks, and where they belong."""
  num_rows, size = len(token_ids), config.block.size
  steps = jnp.arange(size, dtype=jnp.int32)[None]
  tokens = jnp.where(steps == 0, token_ids[:, None], config.block.mask_token_id)
  positions = jnp.maximum(rows.positions[:, :1] - 1, 0) + steps
  pages = jnp.take_along_axis(
    rows.page_table, positions // cache.page_size, axis=1
  )
  places = pages * cache.page_size + positions % cache.page_size
  is_row = rows.lengths > 0
  index = jnp.arange(num_rows * size, dtype=jnp.int32)
  batch = FlatBatch(
    positions=positions.ravel(),
    places=jnp.where(is_row[:, None], places, cache.num_places).ravel(),
    block_tokens=index.reshape(num_rows, size),
    block_lengths=jnp.where(is_row, size, 0),
    block_pages=rows.page_table,
    block_places=index,
    block_mask=jnp.ones((num_rows, size, size), bool),
  )
  return tokens.ravel(), batch


@functools.partial(jax.jit, static_argnames=('config', 'length'))
def chains(
  params: Params,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  length: int,
) -> jax.Array:
  """Returns the best token of each place, as chains i32[U, K].

  Args:
    params: parameters of the draft.
    logits: f32[R, D, V'].
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    length: K; static.
  """
  noise = noise_of_outputs(params, config, noise)
  scores = choices.draft_scores(logits, noise, rows.slots, sampling)
  index = jnp.argmax(scores, axis=-1).astype(jnp.int32)
  num_slots = sampling.seeds.shape[0]
  # Padding belongs to no slot.
  slots = jnp.where(rows.lengths > 0, rows.slots, num_slots)
  drafted = jnp.zeros((num_slots, length), jnp.int32)
  return drafted.at[slots].set(
    decoder.token_ids_of(params, config, index), mode='drop'
  )


@functools.partial(
  jax.jit,
  static_argnames=('config', 'num_nodes', 'sizes', 'kinds', 'min_leaf_mass'),
)
def grow(
  params: Params,
  logits: jax.Array,
  noise: jax.Array | None,
  rows: DraftRows,
  num_steps: jax.Array,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  num_nodes: int,
  sizes: tuple[int, int],
  kinds: tuple[text_lookup.Kind, ...],
  min_leaf_mass: float,
) -> Grown:
  """Grows trees, in which each place has the same tokens below all nodes.

  Args:
    params: parameters of the draft.
    logits: f32[R, D, V'].
    noise: f32[R, D, V] of the target, None where all slots are greedy.
    rows: rows to draft for.
    num_steps: i32[] levels of a tree below the first, at most D - 1.
    sampling: sampling parameters of the U slots.
    config: configuration of the draft; static.
    num_nodes: T to choose; static.
    sizes: leaves that get children at once, and children of a leaf; static.
    kinds: kinds of lookups in the known text; static.
    min_leaf_mass: same as in `draft_tree.grow`; static.
  """
  noise = noise_of_outputs(params, config, noise)
  scores = choices.draft_scores(logits, noise, rows.slots, sampling)
  best, index = jax.lax.top_k(scores, sizes[1])
  token_ids = decoder.token_ids_of(params, config, index)
  log_probs = best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)

  def draft_fn(carry, leaves):
    def below(values):
      return jnp.take_along_axis(values, leaves.depths[:, :, None], axis=1)

    return below(token_ids), below(log_probs), carry

  return draft_tree.grown(
    (token_ids[:, :1], log_probs[:, :1]),
    None,
    draft_fn,
    rows,
    num_steps,
    num_forwards=logits.shape[1],
    num_nodes=num_nodes,
    sizes=sizes,
    kinds=kinds,
    min_leaf_mass=min_leaf_mass,
    num_slots=sampling.seeds.shape[0],
  )


class _BlockForwards(ModelDrafter):
  """What chains and trees of blocks have in common."""

  def commit(
    self,
    view: policies.StepView,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    is_present: np.ndarray,
  ) -> None:
    # Features of what was accepted are read with the next draft.
    del view, drafted, verified, accepted, is_present

  @property
  def _num_unread(self) -> int:
    return 1

  @property
  def _num_spare_pages(self) -> int:
    page_size = self._sizes.scheduler.page_size
    return -(-self._model.config.block.size // page_size)

  @property
  def _num_forwards(self) -> int:
    """D, all of which one forward drafts."""
    longest = self._sizes.scheduler.buckets.max_length
    return min(longest, self._model.config.block.num_drafts)

  def _num_steps(self, length: int) -> int:
    return min(length, self._num_forwards) - 1

  def _take_in(
    self,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    texts: SlotTexts,
  ) -> None:
    num_tokens = self._sizes.scheduler.buckets.max_query_tokens
    self.cache = self._call(
      take_in,
      self._model.params,
      self.cache,
      self._context(num_tokens, slots, starts, counts, texts),
      config=self._model.config,
    )

  def _first_forward(
    self,
    sizes: FlatSizes,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    texts: SlotTexts,
  ) -> tuple[DraftRows, None, jax.Array]:
    kv_lengths = starts + counts - 1
    rows = self._rows(sizes, slots, starts, counts, lengths, texts)
    tables = self._with_spare_pages(rows.page_table, kv_lengths)
    last = texts.token_ids[slots, kv_lengths]
    token_ids = flat_batch.padded(last, sizes.num_rows)
    rows, token_ids = self._put((rows.replace(page_table=tables), token_ids))
    self.cache, logits = self._call(
      block_logits,
      self._model.params,
      self.cache,
      self._context(sizes.num_tokens, slots, starts, counts - 1, texts),
      token_ids,
      rows,
      config=self._model.config,
      length=self._num_forwards,
    )
    return rows, None, logits

  def _context(
    self,
    num_tokens: int,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    texts: SlotTexts,
  ) -> Context:
    """Returns i64[r] tokens of rows from `starts` i64[r] on, on the devices."""
    rows = np.repeat(np.arange(len(slots)), counts)
    before = np.cumsum(counts) - counts
    positions = starts[rows] + np.arange(len(rows)) - before[rows]
    places = flat_batch.places_of(
      texts.page_table[slots],
      rows,
      positions,
      self.cache.page_size,
      self.cache.num_pages,
    )
    positions = flat_batch.padded(positions, num_tokens)
    places = flat_batch.padded(places, num_tokens, self.cache.num_places)
    positions, places = self._put((positions, places))
    return Context(
      pages=self._target.features, positions=positions, places=places
    )

  def _with_spare_pages(
    self, page_table: np.ndarray, kv_lengths: np.ndarray
  ) -> np.ndarray:
    """Returns i32[R, C + S]: spare pages behind those of i64[r] tokens."""
    num_spare, page_size = self._num_spare_pages, self.cache.page_size
    tables = np.pad(page_table, ((0, 0), (0, num_spare)))
    rows = np.arange(len(kv_lengths))[:, None]
    spare = np.arange(num_spare)[None]
    first = -(-kv_lengths // page_size)[:, None]
    tables[rows, first + spare] = (
      self._sizes.scheduler.num_pages + rows * num_spare + spare
    )
    return tables


class BlockDrafter(_BlockForwards):
  """Chains: one forward for all tokens of a draft."""

  def __init__(self, model: Model, sizes: ProgramSizes, target: Target):
    """Allocates the cache.

    Raises:
      UserError: longer drafts are declared than a block has.
    """
    super().__init__(model, sizes, target)
    longest = sizes.scheduler.buckets.max_length
    most = model.config.block.num_drafts
    if longest > most:
      raise errors.UserError(
        f'drafts of up to {longest} tokens are declared, but a forward of '
        f'{model.name} drafts {most}; declare lengths of at most {most}'
      )

  def _propose(self, hidden, logits, noise, rows, num_steps, sampling):
    del hidden, num_steps  # one forward was all
    return self._call(
      chains,
      self._model.params,
      logits,
      noise,
      rows,
      sampling,
      config=self._model.config,
      length=self._sizes.scheduler.buckets.max_length,
    )

  def _slot_drafts(
    self, view: policies.StepView, lengths: np.ndarray, found: jax.Array
  ) -> SlotDrafts:
    del view
    return SlotDrafts(drafts=policies.Drafts(lengths=lengths), token_ids=found)


class BlockTreeDrafter(_BlockForwards, TreeDrafter):
  """Trees of the tokens of a block."""

  def _propose(self, hidden, logits, noise, rows, num_steps, sampling) -> Grown:
    del hidden
    return self._call(
      grow,
      self._model.params,
      logits,
      noise,
      rows,
      num_steps,
      sampling,
      config=self._model.config,
      num_nodes=self._sizes.scheduler.buckets.max_length + 1,
      sizes=self._sizes_of_trees,
      kinds=self._draft.kinds,
      min_leaf_mass=self._draft.min_leaf_mass,
    )
