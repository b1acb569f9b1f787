"""The target on its devices: its cache, and the forwards of steps.

Legend: M queries, B slots, K longest draft, T = K + 1, V vocabulary, S tokens
of the longest text.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from swiftspec_jax import policies, sharding, types
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.cache import dense, paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models.params import Params
from swiftspec_jax.requests import Request
from swiftspec_jax.step import (
  ahead_of_time,
  slot_images,
  slot_sampling,
  slot_trees,
  stateless_drafter,
  step_input,
  target_forward,
  verify,
)
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.control_flow import run_if
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_drafts import Search, SlotDrafts
from swiftspec_jax.step.slot_images import SlotImages
from swiftspec_jax.step.slot_sampling import SamplingLevel
from swiftspec_jax.step.slot_trees import SlotTrees
from swiftspec_jax.step.target_forward import Cache
from swiftspec_jax.step.unread_tokens import Texts
from swiftspec_jax.step.verdicts import Verdicts


@functools.partial(jax.jit, static_argnames='kernels', donate_argnames='cache')
def commit_nodes(
  cache: Cache, places: jax.Array, packed: jax.Array, *, kernels: str
) -> Cache:
  """Moves the accepted nodes of trees one after another.

  Args:
    cache: donated.
    places: i32[B, T] of the nodes, as `PlacedStep.node_places`.
    packed: packed `Verdicts` on trees.
    kernels: static name, one of `kernels_pallas.dispatch.IMPLEMENTATIONS`.
  """
  num_nodes = places.shape[1]
  verdicts = Verdicts.unpack(packed, num_nodes)
  nodes = jnp.arange(num_nodes)[None]
  is_accepted = nodes <= verdicts.num_accepted[:, None]
  if isinstance(cache, dense.KVCache):
    # What is no accepted node stays: slots without a tree have anything there.
    path = jnp.where(is_accepted, verdicts.tree.path, nodes)
    return _commit_rows(cache, places[:, 0], path, kernels)
  sources = jnp.take_along_axis(places, verdicts.tree.path, axis=1)
  targets = jnp.where(is_accepted, places, cache.num_places)
  return paged.commit(cache, sources[:, 1:], targets[:, 1:], kernels=kernels)


def _commit_rows(cache, starts, path, kernels):
  """Moves what lies at `path` i32[B, T] after `starts` i32[B]."""
  if cache.features is not None:
    places = (starts[:, None] + path)[:, :, None]
    features = jnp.take_along_axis(cache.features, places, axis=1)
    cache = dense.write_features(cache, features, starts)
  # How long rows are is known of the texts.
  cache = cache.replace(kv_lengths=starts)
  return dense.commit(cache, path, jnp.zeros_like(starts), kernels=kernels)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'flat', 'num_queries'),
  donate_argnames='cache',
)
def query_logits(
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  drafted: jax.Array,
  trees: SlotTrees | None,
  images: SlotImages | None,
  *,
  config: ModelConfig,
  flat: StepSizes,
  num_queries: int,
) -> tuple[Cache, jax.Array, jax.Array, verify.Queries, jax.Array | None]:
  """Runs the target over the tokens of a step.

  Args:
    params: parameters of the target.
    cache: donated.
    packed: step, as `step_input.pack` returns it.
    rows: texts of the slots.
    drafted: i32[B, K].
    trees: trees of the drafts; None where they are chains, or none.
    images: images of the slots; None where the model reads none.
    config: static configuration of the model.
    flat: static sizes of the program.
    num_queries: M; static.

  Returns:
    The cache; logits f32[M, V], token ids i32[M] and more of the queries; and
    `PlacedStep.node_places`.
  """
  step = step_input.place(
    packed, rows, drafted, trees, cache, flat=flat, num_queries=num_queries
  )
  found = None
  if images is not None:
    found = images.of_tokens(step.slots, step.batch.positions)
  hidden, cache = target_forward.forward(
    params, config, step.token_ids, step.batch, cache, images=found
  )
  token_ids = step.token_ids
  if num_queries < flat.num_tokens:
    hidden, token_ids = hidden[step.query_index], token_ids[step.query_index]
  logits = target_forward.logits_of(params, config, hidden)
  return cache, logits, token_ids, step.queries, step.node_places


def _run_parts(
  call: Callable[..., Any],
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  chains: jax.Array,
  trees: jax.Array | None,
  images: SlotImages | None,
  sampling: sampling_lib.SamplingState,
  *,
  config: ModelConfig,
  flat: StepSizes,
  num_queries: int,
  level: SamplingLevel,
  sharding: NamedSharding,
  find_masks: Callable[[], tuple[Any, Any]] | None = None,
) -> tuple[Cache, Rows, jax.Array, types.Logprobs | None]:
  """Runs the parts of a step, each by `call`.

  Chains and trees are those of `SlotDrafts`; where there are trees, chains are
  not looked at. `find_masks` returns masks and index of `verify.restrict`; the
  host works on them while the devices run the target. The other arguments are
  those of the parts.

  Returns:
    The cache, and what `verify.verify` returns.
  """
  if trees is not None:
    chains, trees = call(slot_trees.of_proposal, trees)
  with jax.named_scope('target_forward'):
    cache, logits, token_ids, queries, places = call(
      query_logits,
      params,
      cache,
      packed,
      rows,
      chains,
      trees,
      images,
      config=config,
      flat=flat,
      num_queries=num_queries,
    )
  if find_masks is not None:
    logits = call(verify.restrict, logits, queries, *find_masks())
  noise = None
  if level != SamplingLevel.GREEDY:
    noise = call(
      verify.make_noise,
      sampling.seeds,
      queries.slots,
      queries.positions,
      vocab_size=config.vocab_size,
    )
  with jax.named_scope('verify'):
    rows, verdicts, logprobs = call(
      verify.verify,
      logits,
      noise,
      token_ids,
      queries,
      chains,
      sampling,
      rows,
      trees,
      reads_texts=level == SamplingLevel.ADJUSTED,
      kernels=config.kernels,
      sharding=sharding,
    )
  if trees is not None:
    with jax.named_scope('commit'):
      cache = call(
        commit_nodes, cache, places, verdicts, kernels=config.kernels
      )
  return cache, rows, verdicts, logprobs


@functools.partial(
  jax.jit,
  static_argnames=('config', 'flat', 'num_queries', 'level', 'sharding'),
  donate_argnames=('cache', 'rows'),
)
def run_step(params, cache, packed, rows, *args, **statics):
  """Does what `_run_parts` does, in one program."""
  return _run_parts(
    ahead_of_time.call, params, cache, packed, rows, *args, **statics
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    *('config', 'flat', 'num_queries', 'level', 'sharding'),
    *('plain', 'drafter', 'max_length'),
  ),
  donate_argnames=('cache', 'rows'),
)
def run_searching_step(
  params: Params,
  cache: Cache,
  packed: jax.Array,
  rows: Rows,
  wanted: jax.Array,
  least_found: jax.Array,
  *args: Any,
  drafter: stateless_drafter.StatelessDrafter,
  max_length: int,
  plain: StepSizes | None,
  flat: StepSizes,
  **statics: Any,
) -> tuple[Any, ...]:
  """Looks drafts up, and does what `run_step` does with them.

  Where none is found, rows feed one token each if there are sizes for it.

  Args:
    params: same as in `query_logits`.
    cache: donated.
    packed: step of rows that decode.
    rows: donated.
    wanted: i32[B] most tokens for each slot.
    least_found: i32[]; above 0 the step is as wide as with drafts.
    *args: further arguments of `_run_parts`.
    drafter: static drafter that looks them up.
    max_length: K; static.
    plain: static sizes for one token a row; None for steps that are as wide
      whatever is found.
    flat: static sizes for drafts.
    **statics: further arguments of `_run_parts`.

  Returns:
    What `_run_parts` does; and `num_found` and chains of `SlotDrafts`.
  """
  with jax.named_scope('look_up'):
    chains, num_found = stateless_drafter.propose(
      rows, wanted, drafter=drafter, max_length=max_length
    )
  run = functools.partial(_run_parts, ahead_of_time.call, params)

  def run_wide(cache, rows):
    return run(cache, packed, rows, chains, None, *args, flat=flat, **statics)

  if plain is None:
    return *run_wide(cache, rows), num_found, chains

  def run_plain(cache, rows):
    cache, rows, *verdicts = run(
      cache,
      step_input.without_drafts(packed),
      rows,
      chains,
      None,
      *args,
      **{**statics, 'flat': plain, 'num_queries': plain.num_rows},
    )
    return cache, rows, *jax.tree.map(pad, tuple(verdicts), outputs)

  def pad(x, wide):
    """Pads what there is of each token of a draft."""
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, wide.shape[1] - x.shape[1])
    return jnp.pad(x, missing)

  outputs = jax.eval_shape(run_wide, cache, rows)[2:]
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)
  carry = (cache, rows, *empty)
  is_wide = jnp.any(num_found > 0) | (least_found > 0)
  carry = run_if(~is_wide, lambda carry: run_plain(*carry[:2]), carry)
  carry = run_if(is_wide, lambda carry: run_wide(*carry[:2]), carry)
  return *carry, num_found, chains


class Target:
  """Runs the target's part of steps.

  Attributes:
    model: model that defines the output.
    rows: texts of the slots, on the devices.
    cache: keys and values, which every program donates.
    sampling: sampling parameters of the slots.
    no_drafts: chains and trees of `SlotDrafts` that stand for none, on the
      devices.
    images: images of the slots, on the devices; None if the model reads none.
    is_image: bool[B, S] which tokens of prompts stand for images, on the host.
    narrows: whether steps feed no draft if the devices find none. On GPUs eight
      tokens take as long as one, and to choose would have them wait for the
      host.
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

    Raises:
      UserError: the pages do not fit the model's devices.
    """
    self.model = model
    platform = model.mesh.devices.flat[0].platform
    self.narrows = sizes.has_rows and platform == 'cpu'
    self._sizes = sizes
    config = sizes.scheduler
    self._max_length = config.buckets.max_length
    self.cache = target_forward.init_cache(model, sizes, feature_layers)
    self._call = ahead_of_time.call
    self._num_slots = config.buckets.max_rows
    self.sampling = self._greedy_sampling()
    no_text = np.zeros((self._num_slots, config.max_context), np.int32)
    # Each array is its own, as they are donated.
    self.rows: Rows = self.put(
      Rows(
        token_ids=no_text,
        lengths=no_text[:, 0].copy(),
        prompt_lengths=no_text[:, 0].copy(),
        max_lengths=no_text[:, 0].copy(),
      )
    )
    self._max_images = sizes.max_images
    self.images = self._no_images(config.max_context)
    self.is_image = np.zeros((self._num_slots, config.max_context), bool)
    shape = (config.buckets.max_rows, config.buckets.max_length)
    chains, trees = np.zeros(shape, np.int32), None
    if takes_trees:
      parents = np.full((shape[0], shape[1] + 1), tree_lib.NO_PARENT, np.int32)
      trees = slot_trees.on_host(chains, parents)
    self.no_drafts = self.put((chains, trees))

  def _greedy_sampling(self) -> slot_sampling.SlotSampling:
    config = self.model.config
    return slot_sampling.SlotSampling(
      self._num_slots, config.vocab_size, self.put, config.eos_token_ids
    )

  def _no_images(self, max_context: int) -> SlotImages | None:
    config = self.model.config
    if config.vision is None:
      return None
    num_images = self._num_slots * self._max_images
    shape = num_images, config.vision.num_tokens, config.embed_dim
    return self.put(
      SlotImages(
        embeddings=np.zeros(shape, self.model.dtype),
        index=np.full((self._num_slots, max_context), -1, np.int32),
      )
    )

  def compiling(self) -> 'Target':
    """Returns a target that compiles its programs instead of running them.

    What it returns of them is abstract. It may be in another thread.
    """
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin.cache = ahead_of_time.abstract(self.cache)
    twin.rows = ahead_of_time.abstract(self.rows)
    twin.images = ahead_of_time.abstract(self.images)
    twin.sampling = twin._greedy_sampling()
    return twin

  @property
  def _replicated(self) -> NamedSharding:
    return sharding.replicated(self.model.mesh)

  @property
  def features(self) -> jax.Array | None:
    """What the draft reads, `PagedCache.features`; the next step takes it."""
    return self.cache.features

  def texts(self, page_table: np.ndarray) -> Texts:
    """Returns what a draft may read; the next step takes it.

    Args:
      page_table: i32[B, any] pages of the slots.
    """
    pages = None
    if self.features is not None:
      is_dense = isinstance(self.cache, dense.KVCache)
      pages = self._row_pages if is_dense else self.put(page_table.copy())
    return Texts(
      token_ids=self.rows.token_ids,
      lengths=self.rows.lengths,
      features=self.features,
      page_table=pages,
      sharding=self._replicated,
    )

  @functools.cached_property
  def _row_pages(self) -> jax.Array:
    """i32[B, 1] pages of slots with rows, each of which is a page."""
    return self.put(np.arange(self._num_slots, dtype=np.int32)[:, None])

  def without_drafts(self, lengths: np.ndarray) -> SlotDrafts:
    """Returns drafts for nobody, with `lengths` i64[B] that are all 0."""
    chains, trees = self.no_drafts
    drafts = policies.Drafts(lengths=lengths)
    return SlotDrafts(drafts=drafts, chains=chains, trees=trees)

  def put(self, tree: Any) -> Any:
    """Returns host arrays on the devices."""
    return sharding.replicate(tree, self.model.mesh)

  def argument(self, tree: Any) -> Any:
    """Returns host arrays as a program takes them, as `sharding.argument`."""
    return sharding.argument(tree, self.model.mesh)

  def assign(self, rows: Rows, is_new: np.ndarray) -> None:
    """Enqueues that some slots bool[B] have other requests from now on."""
    new, is_new = self.put((rows, is_new))
    self.rows = self._call(rows_lib.assign, self.rows, new, is_new)

  def assign_images(self, slot: int, request: Request) -> None:
    """Enqueues that a slot has the images of another request from now on."""
    if self.images is None:
      return
    token_id = self.model.config.vision.image_token_id
    is_image = np.zeros(self.is_image.shape[1], bool)
    is_image[: len(request.token_ids)] = np.equal(request.token_ids, token_id)
    self.is_image[slot] = is_image
    first = slot * self._max_images
    num_before = first * self.model.config.vision.num_tokens
    index = np.where(is_image, num_before - 1 + np.cumsum(is_image), -1)
    for i, image in enumerate(request.images):
      self._see(image.pixels, first + i)
    self._assign_index(slot, index.astype(np.int32))

  def _assign_index(self, slot: int, index: np.ndarray) -> None:
    slot, index = self.put((np.int32(slot), index))
    self.images = self._call(slot_images.assign, self.images, slot, index)

  def _see(self, pixels: np.ndarray, place: int) -> None:
    pixels, place = self.put((pixels, np.int32(place)))
    self.images = self._call(
      slot_images.see,
      self.model.params['vision'],
      self.images,
      pixels,
      place,
      config=self.model.config.vision,
    )

  def warm_up(self) -> None:
    """Goes through the programs that no step has."""
    none = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.rows)
    self.assign(none, np.zeros(self._num_slots, bool))
    if self.images is not None:
      size = self.model.config.vision.image_size
      self._see(np.zeros((size, size, 3), np.uint8), 0)
      self._assign_index(0, np.zeros(self.is_image.shape[1], np.int32))

  def dispatch(
    self,
    packed: np.ndarray,
    flat: StepSizes,
    drafts: SlotDrafts | None,
    level: SamplingLevel,
    least_found: int = 0,
    find_masks: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None,
  ) -> tuple[jax.Array, types.Logprobs | None, SlotDrafts | None]:
    """Enqueues a step; does not wait for it.

    Args:
      packed: step, as `step_input.pack` returns it.
      flat: sizes of the program.
      drafts: drafts of the step; None if nothing is verified.
      level: level of sampling.
      least_found: tokens that a lookup finds at least, to measure the time.
      find_masks: function that returns masks and index of `verify.restrict`,
        where grammars restrict rows; the drafts are on the host then.

    Returns:
      Numbers and tokens, and log-probabilities, as `verify.verify` does; and
      the drafts with what was looked up.
    """
    sampling = self.sampling.state(level)
    statics = {
      'config': self.model.config,
      'flat': flat,
      'num_queries': self._sizes.num_logits(flat),
      'level': level,
      'sharding': self._replicated,
    }
    arrays = self.model.params, self.cache, self.argument(packed), self.rows
    search = drafts and drafts.search
    if search is not None and flat.has_draft_blocks:
      plain = self._sizes.plain(flat.num_rows, flat.context)
      *outputs, num_found, chains = self._call(
        run_searching_step,
        *arrays,
        self.argument(search.wanted),
        self.argument(np.int32(least_found)),
        self.images,
        sampling,
        drafter=search.drafter,
        max_length=self._max_length,
        plain=plain if self.narrows else None,
        **statics,
      )
      self.cache, self.rows, verdicts, logprobs = outputs
      drafts = dataclasses.replace(drafts, num_found=num_found, chains=chains)
      return verdicts, logprobs, drafts
    if search is not None:
      chains, num_found = self.find(search)
      drafts = dataclasses.replace(drafts, num_found=num_found, chains=chains)
    run = functools.partial(_run_parts, self._call)
    if find_masks is not None:
      statics['find_masks'] = lambda: self.argument(find_masks())
    elif self._sizes.has_rows:
      # Few programs: the requests at hand need one level or two of sampling.
      run = functools.partial(self._call, run_step)
    self.cache, self.rows, verdicts, logprobs = run(
      *arrays, *self._arrays_of(drafts, flat), self.images, sampling, **statics
    )
    return verdicts, logprobs, drafts

  def _arrays_of(
    self, drafts: SlotDrafts | None, flat: StepSizes
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns chains and trees of drafts, on the devices of the step."""
    chains, trees = self.no_drafts
    if drafts is None:
      return chains, trees if flat.block_size > 1 else None
    found = drafts.chains, drafts.trees
    is_there = any(isinstance(x, jax.Array) for x in found)
    if not is_there:
      found = self.put(found)
    return (found[0], None) if trees is None else (chains, found[1])

  def no_masks(self, flat: StepSizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns masks and index for `verify.restrict`, which allow everything.

    Args:
      flat: sizes of the program.
    """
    num_nodes = 1 if flat.block_size == 1 else self._max_length + 1
    num_words = -(-self.model.config.vocab_size // 32)
    masks = np.zeros((self._sizes.num_logits(flat), num_words), np.int32)
    return masks, np.full((self._num_slots, num_nodes), -1, np.int32)

  def find(self, search: Search) -> tuple[jax.Array, jax.Array]:
    """Enqueues a lookup; returns chains, and `num_found`."""
    return self._call(
      stateless_drafter.propose,
      self.rows,
      self.argument(search.wanted),
      drafter=search.drafter,
      max_length=self._max_length,
    )
