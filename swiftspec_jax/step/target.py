"""The target on its devices: its cache, and the forwards of steps.

Legend: B slots, K longest draft, S tokens of the longest text.
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from swiftspec_jax import policies
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import (
  ahead_of_time,
  slot_sampling,
  slot_trees,
  stateless_drafter,
  target_forward,
  target_programs,
)
from swiftspec_jax.step import rows as rows_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.rows import Rows
from swiftspec_jax.step.slot_drafts import Search, SlotDrafts
from swiftspec_jax.step.slot_sampling import SamplingLevel
from swiftspec_jax.step.unread_tokens import Texts
from swiftspec_jax.tree import types


class Target:
  """Runs the target's part of steps.

  Attributes:
    model: model that defines the output.
    rows: texts of the slots, on the devices.
    cache: keys and values, which every program donates.
    sampling: sampling parameters of the slots.
    no_drafts: chains and trees of `SlotDrafts` that stand for none, on the
      devices.
    takes_trees: whether drafts are trees, not chains.
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
    self.takes_trees = takes_trees
    platform = model.mesh.devices.flat[0].platform
    self.narrows = sizes.has_rows and platform == 'cpu'
    self._sizes = sizes
    config = sizes.scheduler
    self._max_length = config.buckets.max_length
    self.cache = target_forward.init_cache(model, sizes, feature_layers)
    self._call = operator.call
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

  def compiling(self) -> 'Target':
    """Returns a target that compiles its programs instead of running them.

    What it returns of them is abstract. It may be in another thread.
    """
    twin = copy.copy(self)
    twin._call = ahead_of_time.compile_only
    twin.cache = ahead_of_time.abstract(self.cache)
    twin.rows = ahead_of_time.abstract(self.rows)
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

  def warm_up(self) -> None:
    """Goes through the programs that no step has."""
    none = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.rows)
    self.assign(none, np.zeros(self._num_slots, bool))

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
    can_search = flat.has_draft_blocks and (
      self.narrows or not self.takes_trees
    )
    if search is not None and can_search:
      plain = self._sizes.plain(flat.num_rows, flat.context)
      *outputs, num_found, chains = self._call(
        target_programs.run_searching_step,
        *arrays,
        self.argument(search.wanted),
        self.argument(np.int32(least_found)),
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
    if drafts is not None and drafts.trees is None:
      trees = self.trees_of(drafts.chains)
      drafts = dataclasses.replace(drafts, trees=trees)
    run = functools.partial(target_programs.run_parts, self._call)
    if find_masks is not None:
      statics['find_masks'] = lambda: self.argument(find_masks())
    elif self._sizes.has_rows and (flat.has_drafts or flat.block_size == 1):
      # Few programs: the requests at hand need one level or two of sampling.
      # Other drafters can take the forwards of prompts, so these are apart.
      run = functools.partial(self._call, target_programs.run_step)
    self.cache, self.rows, verdicts, logprobs = run(
      *arrays, *self._arrays_of(drafts, flat), sampling, **statics
    )
    return verdicts, logprobs, drafts

  def _arrays_of(
    self, drafts: SlotDrafts | None, flat: StepSizes
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns chains and trees of drafts, on the devices of the step."""
    chains, trees = self.no_drafts
    if drafts is None:
      return chains, trees if flat.has_drafts else None
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
    num_nodes = self._max_length + 1 if flat.has_drafts else 1
    num_words = -(-self.model.config.vocab_size // 32)
    masks = np.zeros((self._sizes.num_logits(flat), num_words), np.int32)
    return masks, np.full((self._num_slots, num_nodes), -1, np.int32)

  def trees_of(self, chains: types.Array) -> types.Array | None:
    """Makes trees of chains, where the target takes trees."""
    if not self.takes_trees:
      return None
    if isinstance(chains, np.ndarray):
      return slot_trees.of_chains(chains)
    return self._call(slot_trees.of_chains_on_devices, chains)

  def find(self, search: Search) -> tuple[jax.Array, jax.Array]:
    """Enqueues a lookup; returns chains, and `num_found`."""
    return self._call(
      stateless_drafter.propose,
      self.rows,
      self.argument(search.wanted),
      drafter=search.drafter,
      max_length=self._max_length,
    )
