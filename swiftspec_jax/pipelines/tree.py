"""Token trees: draft and target are programs of their own.

On the same devices they take turns (serial mode); on disjoint ones the tree
grows while the target verifies (asynchronous mode, SwiftSpec section 3.1).
Between them go two small integer arrays a round, and the target's features of
the verified tokens if the draft reads them; the host waits for none.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swiftspec_jax import buckets, tree_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import catch_up, tree_draft
from swiftspec_jax.drafting.adaptive_lookup import AdaptiveLookup
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import step_timing, tree_checks, tree_sizes
from swiftspec_jax.pipelines.depth_price import DepthPrice
from swiftspec_jax.pipelines.draft_lag import DraftLag
from swiftspec_jax.pipelines.draft_rows import DraftRows
from swiftspec_jax.pipelines.target_rows import TargetRows
from swiftspec_jax.requests import Request

_PAUSE_TOKENS = 8  # most of a round without the draft


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
      target: model that decides every token of the output.
      draft: model that drafts, on the target's devices or on others.
      tree_config: sizes of the tree.
      batch_size: B.
      timeline: record of when the programs ran.

    Raises:
      UserError: the models share a part of their devices only, or a size does
        not fit the draft model.
    """
    self.is_async = tree_checks.are_disjoint(target, draft)
    tree_checks.check_sizes(draft, tree_config)
    tree_checks.check_features(target, draft, tree_config)
    self._target, self._draft = target, draft
    self._batch_size = batch_size
    self._tree_config = tree_config
    # What the host decides must not be compiled in.
    self._compiled_config = dataclasses.replace(
      tree_config,
      num_draft_steps=0,
      num_restart_steps=0,
      waits_for_misses=False,
      is_adaptive=False,
      min_leaf_mass=0.0,
      is_depth_priced=False,
    )
    # Where the two take turns, nothing grows while the target verifies.
    self._waits = int(tree_config.waits_for_misses or not self.is_async)
    self._timeline = timeline
    # Drafts on the target's devices while the draft pauses.
    self._pause_drafter = _pause_drafter(tree_config)
    self._pause_params: jax.Array | None = None
    self._target_rows = TargetRows(
      target,
      self._pause_drafter,
      None,
      batch_size=batch_size,
      num_query_tokens=tree_config.num_nodes,
      feature_layers=draft.config.feature_layers,
    )
    self._draft_rows = DraftRows(draft, tree_config, batch_size)
    self._no_news = sharding_lib.replicate(
      _no_news(draft, batch_size, tree_config.num_nodes), draft.mesh
    )
    self._count = functools.cache(self._count)
    self._budgets = functools.cache(self._budgets)
    self._mass = functools.cache(self._mass)
    self._measure_steps = functools.cache(self._measure_steps)
    self._sizes = tree_sizes.TreeSizes(tree_config, is_async=self.is_async)
    self._price: DepthPrice | None = None
    if tree_config.is_depth_priced:
      self._price = DepthPrice(
        num_nodes=tree_config.num_nodes,
        num_steps=tree_config.num_draft_steps,
        is_async=self.is_async,
      )
    # Of the next round. The proposal lies on the target's devices; a pause
    # needs none.
    self._next: tree_sizes.Sizes | None = None
    self._proposal: jax.Array | None = None
    self._lag = DraftLag()
    # Their verdicts, on the target's devices, if the draft reads features.
    self._missed: types.PackedVerified | None = None

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

  def assume(self, times: tree_sizes.StepTimes) -> None:
    """Makes adaptive sizes take these times for those of all steps."""
    self._measure_steps = lambda capacity: times

  def _adapt(self, times: tree_sizes.StepTimes) -> None:
    """Adapts the sizes to the seconds that steps take."""
    self._sizes.start(times)
    if isinstance(self._pause_drafter, AdaptiveLookup):
      seconds = [times.pause_seconds[n] for n in self._pause_drafter.lengths]
      self._pause_params = self._on_target(np.array(seconds, np.float32))

  def prepare(self, limit: int, sampling: Sequence[SamplingParams]) -> None:
    self._target_rows.prepare(limit, sampling)
    self._draft_rows.prepare(limit)
    self._sizes.reset()
    if self._tree_config.is_adaptive and self._draft.config.reads_features:
      self._missed = sharding_lib.replicate(
        _no_news(self._draft, self._batch_size, self._tree_config.num_catch_up),
        self._target.mesh,
      )
    if self._tree_config.is_adaptive:
      self._adapt(self._measure_steps(self.capacity))
    if self._price is not None:
      self._price.start(self._measure_steps(self.capacity))
    self._forget_proposal()
    self._lag = DraftLag()

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    chunks = list(chunks)
    outputs = self._target_rows.admit(slot, request, limit, chunks)
    self._draft_rows.admit(slot, request, chunks, outputs)
    jax.block_until_ready((self._target_rows.state, self._draft_rows.state))
    self._forget_proposal()  # has the row's former tree
    self._forget_missed([slot])

  def stop(self, slot: int) -> None:
    self._target_rows.stop(slot)
    self._draft_rows.stop(slot)

  def warmup(self) -> None:
    compiled = self._compiled_sizes()
    for sizes in compiled:
      self.follow(sizes=sizes)
      verified, _ = self.verify()
      if self.is_async:
        self.grow()
    if tree_sizes.PAUSE in compiled:
      self._note_missed(verified)
      self._catch_up()
    jax.block_until_ready((self._target_rows.state, self._draft_rows.state))
    self._forget_proposal()

  def dispatch(self) -> types.StepOutput:
    if self._timeline is not None:
      self._timeline.start_round()
    if self._next is None:
      self.follow()
    self._sizes.note_verified(self._next)
    verified, output = self.verify()
    if self.is_async and self._next != tree_sizes.PAUSE:
      self.grow()
    self.follow(verified)
    return output

  def observe(self, reports: Sequence[types.StepReport]) -> None:
    self._sizes.observe(reports)
    if self._price is not None:
      self._price.observe(reports)
    self._lag.read([len(report.token_ids) for report in reports])

  def verify(self) -> tuple[types.PackedVerified, types.StepOutput]:
    """Enqueues the target's part; returns what goes to draft and host."""
    dispatched = time.perf_counter()
    common = {
      'config': self._target.config,
      'feature_layers': self._draft.config.feature_layers,
    }
    params, state = self._target.params, self._target_rows.state
    if self._proposal is None:
      after = None
      state, verified, output = tree_step.pause_step(
        params,
        self._pause_params,
        state,
        drafter=self._pause_drafter,
        max_nodes=self._tree_config.num_nodes,
        **common,
      )
    else:
      after = 'proposal'
      state, verified, output = tree_step.verify_step(
        params,
        state,
        self._proposal,
        num_nodes=self._next.num_nodes,
        **common,
      )
    self._target_rows.state = state
    self._note(timeline_lib.TARGET, 'verify', dispatched, verified, after)
    return verified, output

  def grow(self) -> None:
    """Enqueues the draft forwards that need no verdict."""
    self._grow(self._sizes.current.num_steps)

  def _grow(self, num_steps: int) -> jax.Array:
    """Enqueues forwards, at most `num_steps`; returns how many ran."""
    dispatched = time.perf_counter()
    self._draft_rows.state, num_forwards = tree_draft.grow(
      self._draft.params,
      self._draft_rows.state,
      self._count(num_steps),
      self._min_mass(),
      config=self._draft.config,
      tree_config=self._compiled_config,
    )
    self._note(timeline_lib.DRAFT, 'grow', dispatched, num_forwards)
    return num_forwards

  def follow(
    self,
    verified: types.PackedVerified | None = None,
    sizes: tree_sizes.Sizes | None = None,
  ) -> None:
    """Enqueues the programs that make the next proposal.

    Args:
      verified: verdict from `verify`; None before the first one.
      sizes: sizes of the proposal; by default what the rounds before suggest.
    """
    sizes = sizes or self._sizes.next()
    is_pause = sizes == tree_sizes.PAUSE
    self._note_round(verified, is_missed=is_pause or self._lag.bound > 0)
    self._next = sizes
    if self._lag.bound and not is_pause:
      self._catch_up()
      self._lag.note_caught_up()
      verified = None  # has been read
    elif (
      self._lag.bound
      > self._tree_config.num_catch_up - self._tree_config.num_nodes
    ):  # the next verdict must fit
      self._catch_up()
      self._lag.note_caught_up(1)  # but for the root
    self._proposal = None if is_pause else self._advance(verified)

  def _note_round(
    self, verified: types.PackedVerified | None, is_missed: bool
  ) -> None:
    """Notes whether the draft will follow the verdict, or miss it."""
    if verified is None:
      self._lag.bound += is_missed  # the root
    elif is_missed:
      self._lag.note_missed(self._most_tokens(self._next))
      self._note_missed(verified)
    else:
      self._lag.note_followed()

  def _most_tokens(self, sizes: tree_sizes.Sizes) -> int:
    """Returns how many tokens a row can emit in a round."""
    if sizes == tree_sizes.PAUSE:
      return self._pause_drafter.num_speculative_tokens + 1
    return sizes.num_nodes

  def _advance(self, verified: types.PackedVerified | None) -> jax.Array:
    """Enqueues the draft's part and both transfers; returns the proposal."""
    sizes = self._next
    verified = self._no_news if verified is None else verified
    verified = self._send('verdict', verified, self._draft, 'verify')
    dispatched = time.perf_counter()
    steps = (0, self._tree_config.num_restart_steps)
    if not self.is_async:
      # The restart is one, too.
      steps = (sizes.num_steps, max(sizes.num_steps - 1, 0))
    proposal = self._follow_verdict(verified, steps, sizes.num_nodes)
    self._note(timeline_lib.DRAFT, 'advance', dispatched, proposal, 'verdict')
    return self._send('proposal', proposal, self._target, 'advance')

  def _follow_verdict(
    self,
    verified: types.PackedVerified,
    steps: tuple[int, int],
    num_nodes: int,
  ) -> jax.Array:
    """Enqueues `tree_draft.advance`; returns the proposal."""
    self._draft_rows.state, proposal = tree_draft.advance(
      self._draft.params,
      self._draft_rows.state,
      verified,
      *(self._count(n) for n in steps),
      self._count(self._waits),
      self._budgets(num_nodes - 1),
      self._min_mass(),
      config=self._draft.config,
      tree_config=self._compiled_config,
      num_nodes=self._tree_config.num_nodes,
    )
    return proposal

  def _send(self, name: str, values: Any, model: Model, after: str) -> Any:
    """Enqueues a transfer to the devices of a model."""
    dispatched = time.perf_counter()
    values = sharding_lib.replicate(values, model.mesh)
    self._note(timeline_lib.TRANSFER, name, dispatched, values, after)
    return values

  def _note_missed(self, verified: types.PackedVerified) -> None:
    """Enqueues that a verdict is kept for the draft, with its features."""
    if self._missed is not None:
      self._missed = catch_up.join(self._missed, verified)

  def _forget_missed(self, slots: Sequence[int]) -> None:
    if self._missed is not None:
      is_forgotten = np.zeros(self._batch_size, bool)
      is_forgotten[slots] = True
      is_forgotten = sharding_lib.replicate(is_forgotten, self._target.mesh)
      self._missed = catch_up.forget(self._missed, is_forgotten)

  def _read_missed(self) -> jax.Array:
    """Enqueues that the draft follows the verdicts that it missed."""
    verified = self._send('missed', self._missed, self._draft, 'verify')
    dispatched = time.perf_counter()
    proposal = self._follow_verdict(verified, steps=(0, 0), num_nodes=1)
    self._note(timeline_lib.DRAFT, 'catch_up', dispatched, proposal, 'missed')
    self._forget_missed(range(self._batch_size))
    return proposal

  def _catch_up(self) -> jax.Array:
    """Enqueues that the draft reads the end of each text."""
    if self._missed is not None:
      return self._read_missed()
    recent = catch_up.recent_tokens(
      self._target_rows.state.token_ids,
      self._target_rows.state.lengths,
      size=self._tree_config.num_catch_up,
    )
    recent = self._send('text', recent, self._draft, 'verify')
    dispatched = time.perf_counter()
    self._draft_rows.state, outcome = catch_up.catch_up(
      self._draft.params,
      self._draft_rows.state,
      recent,
      config=self._draft.config,
      tree_config=self._compiled_config,
    )
    self._note(timeline_lib.DRAFT, 'catch_up', dispatched, outcome, 'text')
    return outcome

  def _compiled_sizes(self) -> list[tree_sizes.Sizes]:
    """Returns sizes that need all programs of a round."""
    if not self._tree_config.is_adaptive:
      return [self._sizes.current]
    return [
      tree_sizes.PAUSE
      if num_nodes == 1
      else tree_sizes.Sizes(num_nodes=num_nodes, num_steps=1)
      for num_nodes in tree_sizes.node_buckets(self._tree_config)
    ]

  def _measure_steps(self, capacity: int) -> tree_sizes.StepTimes:
    """Times the programs of this capacity on idle rows, which stay idle."""
    del capacity  # is that of the rows
    compiled = self._compiled_sizes()
    trees = [sizes for sizes in compiled if sizes != tree_sizes.PAUSE]
    drafter = self._pause_drafter

    def pause(length):
      if isinstance(drafter, AdaptiveLookup):
        self._pause_params = self._on_target(drafter.forcing(length))
      self.follow(sizes=tree_sizes.PAUSE)
      return self.verify

    def verify(sizes):
      self.follow(sizes=sizes)
      return verify_beside_growth if self.is_async else self.verify

    def verify_beside_growth():  # devices may share a processor
      verified, _ = self.verify()
      self._grow(self._tree_config.num_draft_steps)
      return verified

    def grow():
      self._draft_rows.clear_trees()
      return lambda: self._grow(1)

    def advance():
      self._draft_rows.clear_trees()
      return lambda: self.follow(sizes=compiled[:2][-1]) or self._proposal

    programs = {
      **{sizes.num_nodes: functools.partial(verify, sizes) for sizes in trees},
      'draft': grow,
      'advance': advance,
    }
    lengths = drafter.lengths if self._tree_config.is_adaptive else ()
    if lengths:  # else the draft never pauses
      programs['catch_up'] = lambda: self._catch_up
      for n in lengths:
        programs['pause', n] = functools.partial(pause, n)
    self._target_rows.fill()
    seconds = step_timing.median_seconds(
      programs,
      lambda: (self._target_rows.state, self._draft_rows.state),
    )
    self._target_rows.empty()
    self._catch_up()  # the draft's rows have followed
    self._draft_rows.make_idle()
    return tree_sizes.StepTimes(
      target_seconds={x.num_nodes: seconds[x.num_nodes] for x in trees},
      pause_seconds={n: seconds['pause', n] for n in lengths},
      draft_seconds=seconds['draft'],
      advance_seconds=seconds['advance'],
      catch_up_seconds=seconds.get('catch_up', 0.0),
    )

  def _forget_proposal(self) -> None:
    self._next = self._proposal = None

  def _min_mass(self) -> jax.Array | None:
    """Returns what the leaves of a forward must hold, if that is asked."""
    if self._price is not None:
      return self._mass(round(self._price.min_mass, 3))
    least = self._tree_config.min_leaf_mass
    return self._mass(least) if least else None

  def _mass(self, value: float) -> jax.Array:
    return sharding_lib.replicate(np.float32(value), self._draft.mesh)

  def _count(self, value: int) -> jax.Array:
    return sharding_lib.replicate(np.int32(value), self._draft.mesh)

  def _budgets(self, value: int) -> jax.Array:
    budgets = np.full(self._batch_size, value, np.int32)
    return sharding_lib.replicate(budgets, self._draft.mesh)

  def _on_target(self, values: np.ndarray) -> jax.Array:
    return sharding_lib.replicate(values, self._target.mesh)

  def _note(self, track, name, dispatched, marker, after=None) -> None:
    if self._timeline is not None:
      marker = jax.tree.leaves(marker)[-1]
      self._timeline.program(track, name, dispatched, marker, after)


def _pause_drafter(tree_config: TreeConfig) -> AdaptiveLookup | NoDraft:
  """Returns what goes on while the draft pauses, which it does if adaptive."""
  longest = min(tree_config.num_nodes, _PAUSE_TOKENS) - 1
  if not (tree_config.is_adaptive and tree_config.prompt_lookup and longest):
    return NoDraft()
  return AdaptiveLookup(num_speculative_tokens=longest)


def _no_news(draft: Model, batch_size: int, num_nodes: int) -> Any:
  """Host arrays of a verdict without tokens."""
  packed = np.zeros((batch_size, num_nodes + 1), np.int32)
  if not draft.config.reads_features:
    return packed
  shape = (batch_size, num_nodes, draft.config.feature_dim)
  return packed, np.zeros(shape, jnp.bfloat16)
