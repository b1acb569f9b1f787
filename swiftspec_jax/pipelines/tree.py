"""Token trees: draft and target are programs of their own.

On the same devices they take turns (serial mode); on disjoint ones the tree
grows while the target verifies (asynchronous mode, SwiftSpec section 3.1).
Between them go two small integer arrays a round, and the host waits for none.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from swiftspec_jax import buckets, errors, tree_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import tree_draft
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import tree_sizes
from swiftspec_jax.pipelines.draft_rows import DraftRows
from swiftspec_jax.pipelines.target_rows import TargetRows
from swiftspec_jax.requests import Request

_NUM_TIMINGS = 6  # of each program, where sizes adapt


class TreePipeline:
  """Rounds of a target and a tree that a draft model grows."""

  def __init__(
    self,
    target: Model,
    draft: Model,
    tree_config: TreeConfig,
    *,
    batch_size: int,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Allocates nothing yet.

    Args:
      target: defines the output.
      draft: on the target's devices, or on others.
      tree_config: sizes of the tree.
      batch_size: B.
      timeline: notes when the programs ran.

    Raises:
      UserError: the models share a part of their devices only, or a size does
        not fit the draft model.
    """
    self.is_async = _are_disjoint(target, draft)
    _check_sizes(draft, tree_config)
    self._target, self._draft = target, draft
    self._tree_config = tree_config
    # What the host decides must not be compiled in.
    self._compiled_config = dataclasses.replace(
      tree_config, num_draft_steps=0, num_restart_steps=0, is_adaptive=False
    )
    self._timeline = timeline
    self._target_rows = TargetRows(
      target,
      NoDraft(),
      None,
      batch_size=batch_size,
      num_query_tokens=tree_config.num_nodes,
    )
    self._draft_rows = DraftRows(draft, tree_config, batch_size)
    self._no_news = jax.device_put(
      np.zeros((batch_size, tree_config.num_nodes + 1), np.int32),
      sharding_lib.replicated(draft.mesh),
    )
    self._count = functools.cache(self._count)
    self._sizes = tree_sizes.TreeSizes(tree_config, is_async=self.is_async)
    self._proposal: jax.Array | None = None  # on the target's devices
    self._num_sent = 0  # nodes of the proposal

  @property
  def num_speculative_tokens(self) -> int:
    return self._tree_config.num_nodes - 1

  @property
  def capacity(self) -> int:
    return self._target_rows.capacity

  @property
  def tree(self):
    """The draft's trees as they are now, for looking at them."""
    return self._draft_rows.state.tree

  def prepare(self, limit: int, features: Sequence[SamplingParams]) -> None:
    self._target_rows.prepare(limit, features)
    self._draft_rows.prepare(limit)
    self._sizes.reset()
    self._proposal = None
    if self._tree_config.is_adaptive and self._sizes.times is None:
      self._sizes.times = self._measure_steps()

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    features: Sequence[SamplingParams],
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    chunks = list(chunks)
    self._target_rows.admit(slot, request, limit, features, chunks)
    self._draft_rows.admit(slot, request, chunks)
    jax.block_until_ready((self._target_rows.state, self._draft_rows.state))
    self._proposal = None  # has the row's former tree

  def warmup(self) -> None:
    for num_nodes in tree_sizes.node_buckets(self._tree_config):
      self.follow(num_nodes=num_nodes)
      self.verify()
      if self.is_async:
        self.grow()
    jax.block_until_ready((self._target_rows.state, self._draft_rows.state))
    self._proposal = None

  def dispatch(self) -> types.StepOutput:
    if self._timeline is not None:
      self._timeline.start_round()
    if self._proposal is None:
      self.follow()
    self._sizes.note_verified(self._num_sent)
    verified, output = self.verify()
    if self.is_async:
      self.grow()
    self.follow(verified)
    return output

  def observe(self, reports: Sequence[types.StepReport]) -> None:
    self._sizes.observe(reports)

  def verify(self) -> tuple[jax.Array, types.StepOutput]:
    """Enqueues the target's part; returns packed `VerifiedTokens`, output."""
    dispatched = time.perf_counter()
    self._target_rows.state, verified, output = tree_step.verify_step(
      self._target.params,
      self._target_rows.state,
      self._proposal,
      config=self._target.config,
      max_nodes=self._tree_config.num_nodes,
    )
    self._note(timeline_lib.TARGET, 'verify', dispatched, verified, 'proposal')
    return verified, output

  def grow(self) -> None:
    """Enqueues the draft forwards that need no verdict."""
    self._grow(self._sizes.num_draft_steps)

  def _grow(self, num_steps: int) -> jax.Array:
    """Enqueues so many forwards; returns how many they will have been."""
    dispatched = time.perf_counter()
    self._draft_rows.state, num_forwards = tree_draft.grow(
      self._draft.params,
      self._draft_rows.state,
      self._count(num_steps),
      config=self._draft.config,
      tree_config=self._compiled_config,
    )
    self._note(timeline_lib.DRAFT, 'grow', dispatched, num_forwards)
    return num_forwards

  def follow(
    self, verified: jax.Array | None = None, num_nodes: int | None = None
  ) -> None:
    """Enqueues what makes the next proposal of a packed verdict.

    Args:
      verified: packed `VerifiedTokens`; None before the first verdict.
      num_nodes: to send; by default what the round before suggests.
    """
    num_nodes = num_nodes or self._sizes.next_num_nodes()
    self._num_sent = num_nodes
    dispatched = time.perf_counter()
    verified = jax.device_put(
      self._no_news if verified is None else verified,
      sharding_lib.replicated(self._draft.mesh),
    )
    self._note(timeline_lib.TRANSFER, 'verdict', dispatched, verified, 'verify')
    dispatched = time.perf_counter()
    num_steps = self._sizes.num_draft_steps
    steps = (0, self._tree_config.num_restart_steps)
    if not self.is_async:
      steps = (num_steps, max(num_steps - 1, 0))  # the restart is one, too
    self._draft_rows.state, proposal = tree_draft.advance(
      self._draft.params,
      self._draft_rows.state,
      verified,
      *(self._count(n) for n in steps),
      config=self._draft.config,
      tree_config=self._compiled_config,
      num_nodes=num_nodes,
    )
    self._note(timeline_lib.DRAFT, 'advance', dispatched, proposal, 'verdict')
    dispatched = time.perf_counter()
    self._proposal = jax.device_put(
      proposal, sharding_lib.replicated(self._target.mesh)
    )
    self._note(
      timeline_lib.TRANSFER, 'proposal', dispatched, self._proposal, 'advance'
    )

  def _measure_steps(self) -> tree_sizes.StepTimes:
    """Times the programs on idle rows, which stay as they are."""

    def seconds(enqueue):
      times = []
      for _ in range(_NUM_TIMINGS):
        jax.block_until_ready((self._target_rows.state, self._draft_rows.state))
        start = time.perf_counter()
        jax.block_until_ready(enqueue())
        times.append(time.perf_counter() - start)
      return statistics.median(times[1:])  # the first one compiles

    draft_seconds = seconds(lambda: self._grow(1))
    target_seconds = {}
    for num_nodes in tree_sizes.node_buckets(self._tree_config):
      self.follow(num_nodes=num_nodes)
      target_seconds[num_nodes] = seconds(self.verify)
    return tree_sizes.StepTimes(
      target_seconds=target_seconds, draft_seconds=draft_seconds
    )

  def _count(self, value: int) -> jax.Array:
    return jax.device_put(
      np.int32(value), sharding_lib.replicated(self._draft.mesh)
    )

  def _note(self, track, name, dispatched, marker, after=None) -> None:
    if self._timeline is not None:
      self._timeline.program(track, name, dispatched, marker, after)


def _are_disjoint(target: Model, draft: Model) -> bool:
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


def _check_sizes(draft: Model, tree_config: TreeConfig) -> None:
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
