"""The target on its devices: its paged cache, and the forwards of steps.

Legend: N tokens, M queries, B slots, S tokens of the longest text, K longest
draft, V vocabulary.
"""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import policies, sharding, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.serving.compilation import ahead_of_time
from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.drafters import slot_trees
from swiftspec_jax.serving.drafters.engine_drafter import SlotDrafts
from swiftspec_jax.serving.drafters.slot_trees import SlotTrees
from swiftspec_jax.serving.target import choices, paged_forward
from swiftspec_jax.serving.target.step_input import StepInput


@jax.jit
def place_nodes(
  step_input: StepInput, trees: SlotTrees
) -> tuple[StepInput, jax.Array]:
  """Brings the nodes of trees to their positions.

  Args:
    step_input: input as if the drafts were chains.
    trees: trees of the drafts.

  Returns:
    The input, and the places i32[B, T] of the nodes in the pages, as
    `FlatBatch.places`.
  """
  batch, queries = step_input.batch, step_input.queries
  tokens = step_input.query_index[queries.index]
  is_node = queries.is_node
  positions = batch.positions[tokens[:, :1]] + trees.depths

  def put(values, index, new):
    index = jnp.where(is_node, index, len(values))
    return values.at[index].set(new, mode='drop')

  num_blocks, width = batch.block_tokens.shape
  # A row and its draft are one block; all other blocks are chains.
  blocks = batch.block_places[tokens[:, 0]] // width
  blocks = jnp.where(is_node[:, 0], blocks, num_blocks)
  rest = width - tokens.shape[1]
  mask = jnp.pad(trees.ancestor_mask, ((0, 0), (0, rest), (0, rest)))
  chains = jnp.tri(width, dtype=bool)
  chains = jnp.broadcast_to(chains, (num_blocks, width, width))
  placed = step_input.replace(
    batch=batch.replace(
      positions=put(batch.positions, tokens, positions),
      block_mask=chains.at[blocks].set(mask, mode='drop'),
    ),
    queries=queries.replace(
      positions=put(queries.positions[:, 0], queries.index, positions + 1)[
        :, None
      ]
    ),
  )
  return placed, batch.places[tokens]


@functools.partial(jax.jit, donate_argnames='cache')
def commit_nodes(
  cache: paged.PagedCache, places: jax.Array, packed: jax.Array
) -> paged.PagedCache:
  """Moves the accepted nodes of trees behind each other.

  Args:
    cache: donated.
    places: i32[B, T] of `place_nodes`.
    packed: i32[B, 2 + 2 T] of `choices.verify`.
  """
  num_nodes = places.shape[1]
  path = packed[:, -num_nodes:]
  is_accepted = jnp.arange(num_nodes)[None] <= packed[:, :1]
  sources = jnp.take_along_axis(places, path, axis=1)
  targets = jnp.where(is_accepted, places, cache.num_places)
  return paged.move(cache, sources[:, 1:].ravel(), targets[:, 1:].ravel())


@functools.partial(jax.jit, static_argnames='config', donate_argnames='cache')
def query_logits(
  params: Params,
  cache: paged.PagedCache,
  step_input: StepInput,
  drafted: jax.Array,
  *,
  config: ModelConfig,
) -> tuple[paged.PagedCache, jax.Array, jax.Array]:
  """Returns the cache, logits f32[M, V] and token ids i32[M] of the queries.

  Args:
    params: parameters of the target.
    cache: donated.
    step_input: tokens that are fed, and where.
    drafted: i32[B, K].
    config: static configuration of the model.
  """
  token_ids = step_input.token_ids
  if drafted.size:
    index = step_input.draft_index
    drafts = drafted.reshape(-1)[jnp.maximum(index, 0)]
    token_ids = jnp.where(index >= 0, drafts, token_ids)
  hidden, cache = paged_forward.forward(
    params, config, token_ids, step_input.batch, cache
  )
  hidden = hidden[step_input.query_index]
  logits = paged_forward.logits_of(params, config, hidden)
  return cache, logits, token_ids[step_input.query_index]


class Target:
  """Runs the target's part of steps.

  Attributes:
    model: model that defines the output.
    sampling: sampling parameters of the slots.
    no_drafts: tokens i32[B, K] that stand for none, and their trees, if drafts
      are trees.
    chains: trees of which each is a chain, if drafts are trees.
  """

  def __init__(
    self,
    model: Model,
    sizes: ProgramSizes,
    *,
    takes_trees: bool,
    feature_layers: tuple[int, ...] = (),
  ):
    """Allocates the cache.

    Args:
      model: model that defines the output.
      sizes: declared.
      takes_trees: drafts are trees, not chains.
      feature_layers: indices of layers whose outputs the draft reads.
    """
    self.model = model
    config = sizes.scheduler
    self._cache = paged.init(
      model.config,
      config.num_pages,
      config.page_size,
      model.dtype,
      model.mesh,
      feature_layers,
    )
    self._replicated = sharding.replicated(model.mesh)
    self._call = ahead_of_time.call
    self._num_slots = config.buckets.max_rows
    self.sampling = self._greedy_sampling()
    shape = (config.buckets.max_rows, config.buckets.max_length + 1)
    trees = chains = None
    if takes_trees:
      no_parents = jnp.full(shape, tree_lib.NO_PARENT, jnp.int32)
      trees = slot_trees.of_parents(no_parents)
      nodes = jnp.arange(shape[1], dtype=jnp.int32)
      chains = slot_trees.of_parents(jnp.broadcast_to(nodes - 1, shape))
    tokens = np.zeros((shape[0], shape[1] - 1), np.int32)
    self.no_drafts = self.put((tokens, trees))
    self.chains: SlotTrees | None = self.put(chains)

  def _greedy_sampling(self) -> choices.SlotSampling:
    return choices.SlotSampling(
      self._num_slots, self.model.config.vocab_size, self.put
    )

  def compiling(self) -> 'Target':
    """Returns a target that compiles its programs instead of running them.

    What it returns of them is abstract. It may be in another thread.
    """
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin._cache = ahead_of_time.abstract(self._cache)
    twin.sampling = self._greedy_sampling()
    return twin

  @property
  def features(self) -> jax.Array | None:
    """What the draft reads, `PagedCache.features`; the next step takes it."""
    return self._cache.features

  def without_drafts(self, lengths: np.ndarray) -> SlotDrafts:
    """Returns drafts for nobody, with `lengths` i64[B] that are all 0."""
    token_ids, trees = self.no_drafts
    drafts = policies.Drafts(lengths=lengths)
    return SlotDrafts(drafts=drafts, token_ids=token_ids, trees=trees)

  def put(self, tree: Any) -> Any:
    """Returns host arrays on the devices."""
    return sharding.replicate(tree, self.model.mesh)

  def dispatch(
    self,
    step_input: StepInput,
    drafted: jax.Array,
    trees: SlotTrees | None,
    level: choices.Level,
    texts: np.ndarray,
  ) -> tuple[jax.Array, types.Logprobs | None]:
    """Enqueues a step; does not wait for it.

    Args:
      step_input: tokens that are fed, and where.
      drafted: i32[B, K] on the devices.
      trees: trees of the drafts, None where they are chains.
      level: level of sampling.
      texts: i32[B, S] known tokens; only the highest level looks at them.

    Returns:
      Numbers and tokens, and log-probabilities, as `choices.verify` does.
    """
    step_input = self.put(step_input)
    if step_input.queries.index.shape[1] == 1:
      trees = None  # a plain step
    if trees is not None:
      step_input, places = self._call(place_nodes, step_input, trees)
    self._cache, logits, token_ids = self._call(
      query_logits,
      self.model.params,
      self._cache,
      step_input,
      drafted,
      config=self.model.config,
    )
    sampling, noise = self.sampling.state(level), None
    if level != choices.Level.GREEDY:
      noise = self._call(
        choices.make_noise,
        sampling.seeds,
        step_input.queries.slots,
        step_input.queries.positions,
        vocab_size=self.model.config.vocab_size,
      )
    packed, logprobs = self._call(
      choices.verify,
      logits,
      noise,
      token_ids,
      step_input.queries,
      drafted,
      sampling,
      self.put(texts) if level == choices.Level.ADJUSTED else None,
      trees,
      kernels=self.model.config.kernels,
      sharding=self._replicated,
    )
    if trees is not None:
      self._cache = self._call(commit_nodes, self._cache, places, packed)
    return packed, logprobs
