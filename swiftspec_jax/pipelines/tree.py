"""Token trees: draft and target are programs of their own.

On the same devices they take turns (serial mode); on disjoint ones the tree
grows while the target verifies (asynchronous mode, SwiftSpec section 3.1).
Between them go two small integer arrays a round, and the target's features of
the verified tokens if the draft reads them; the host waits for none.
"""

import collections
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from swiftspec_jax import buckets, hosts, spec_step, tree_step, types
from swiftspec_jax import sharding as sharding_lib
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import feature_draft, forced_acceptance
from swiftspec_jax.drafting.no_draft import NoDraft
from swiftspec_jax.drafting.text_news import Texts
from swiftspec_jax.drafting.texts.adaptive_lookup import AdaptiveLookup
from swiftspec_jax.drafting.trees import tree_checks
from swiftspec_jax.drafting.trees.tree_draft import TreeDraftState
from swiftspec_jax.drafting.trees.tree_draft_rows import TreeDraftRows
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import step_timing, tree_sizes
from swiftspec_jax.pipelines.target_rows import TargetRows
from swiftspec_jax.requests import Request

_PAUSE_TOKENS = 8  # most of a round without the draft
_CATCH_UP = 32  # tokens, behind a short pause


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
    feature_draft.check_lives(draft)
    feature_draft.check_layers(draft, target)
    self._target, self._draft = target, draft
    self._tree_config = tree_config
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
    self._draft_rows: TreeDraftRows | None = None
    # Whole rows are the pages of the texts.
    self._row_pages = sharding_lib.replicate(
      np.arange(batch_size, dtype=np.int32)[:, None], target.mesh
    )
    self._measure_steps = functools.cache(self._measure_steps)
    self._assumed: tree_sizes.StepTimes | None = None
    self._sizes = tree_sizes.TreeSizes(tree_config, is_async=self.is_async)
    # Of the next round. The proposal lies on the target's devices; a pause
    # needs none.
    self._next: tree_sizes.Sizes | None = None
    self._proposal: jax.Array | None = None
    self._is_busy = np.zeros(batch_size, bool)
    # Tokens of the texts that the host knows, and that the draft has read at
    # least; the sizes of rounds that were not read; and the most tokens of a
    # row in rounds that the draft was not told of.
    self._num_known = np.zeros(batch_size, np.int64)
    self._num_read = np.zeros(batch_size, np.int64)
    self._unread: collections.deque[tree_sizes.Sizes] = collections.deque()
    self._num_missed = 0

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
    """Makes all that is chosen while decoding take these times for real."""
    self._measure_steps = lambda capacity: times
    self._assumed = times

  def _adapt(self, times: tree_sizes.StepTimes) -> None:
    """Adapts the sizes to the seconds that steps take."""
    self._sizes.start(times)
    if isinstance(self._pause_drafter, AdaptiveLookup):
      seconds = [times.pause_seconds[n] for n in self._pause_drafter.lengths]
      self._pause_params = self._on_target(np.array(seconds, np.float32))

  def prepare(self, limit: int, sampling: Sequence[SamplingParams]) -> None:
    self._target_rows.prepare(limit, sampling)
    self._prepare_draft(buckets.power_of_two(limit))
    self._is_busy[:] = False
    if self._tree_config.is_adaptive:
      self._adapt(self._measure_steps(self.capacity))
    self._forget_rounds()

  def _prepare_draft(self, max_context: int) -> None:
    rows = self._draft_rows
    if rows is None or rows.is_lost or rows.max_context != max_context:
      self._draft_rows = rows = None  # free it first
      self._draft_rows = TreeDraftRows(
        self._draft,
        self._tree_config,
        self._target,
        num_rows=len(self._is_busy),
        max_context=max_context,
        timeline=self._timeline,
      )

  def admit(
    self,
    slot: int,
    request: Request,
    limit: int,
    chunks: Iterable[buckets.Chunk],
  ) -> None:
    chunks = list(chunks)
    self._target_rows.admit(slot, request, limit, chunks)
    reference = None
    if self._tree_config.forced_acceptance is not None:
      reference = forced_acceptance.make_reference(
        request.token_ids + request.reference_token_ids,
        request.sampling.seed,
        self._draft_rows.max_context,
      )
    self._draft_rows.put_text(slot, request.token_ids, reference)
    # It reads the root, too, even where that is the whole prompt.
    for start, size, _ in chunks or buckets.plan_prefill(1, self.capacity):
      self._read(slot, start, size)
    self._num_known[slot] = self._num_read[slot] = len(request.token_ids)
    self._is_busy[slot] = True
    jax.block_until_ready(self._states())
    self._forget_proposal()  # has the row's former tree

  def stop(self, slot: int) -> None:
    self._target_rows.stop(slot)
    self._is_busy[slot] = False

  def warmup(self) -> None:
    for sizes in self._compiled_sizes():
      self.follow(sizes)
      self.verify()
      if self.is_async:
        self.grow()
    programs = {**self._tree_programs(), 'advance': self._prepare_advance}
    step_timing.warm_up(programs, self.capacity, self._states)
    self._target_rows.fill(0)
    self._forget_rounds()

  def dispatch(self) -> types.StepOutput:
    if self._timeline is not None:
      self._timeline.start_round()
    if self._next is None:
      self.follow()
    output = self.verify()
    if self.is_async and self._next != tree_sizes.PAUSE:
      self.grow()
    self.follow()
    return output

  def observe(
    self, reports: Mapping[int, types.StepReport], seconds: float | None
  ) -> None:
    sizes = self._unread.popleft()
    for slot, report in reports.items():
      self._num_known[slot] += len(report.token_ids)
    if hosts.is_together():  # where all must decide alike
      seconds = None
    own = list(reports.values())
    if own and sizes != tree_sizes.PAUSE:
      self._observe_rates(sizes, own, seconds)
    self._sizes.observe(sizes, own, None if self._assumed else seconds)

  def _observe_rates(
    self,
    sizes: tree_sizes.Sizes,
    reports: Sequence[types.StepReport],
    seconds: float | None,
  ) -> None:
    num_forwards = max(report.num_forwards for report in reports)
    if self._assumed is not None:
      seconds = self._assumed.round_seconds(
        sizes.num_nodes, sizes.num_steps * self.is_async, num_forwards
      )
    self._draft_rows.rates.observe(
      np.array([report.num_drafted + 1 for report in reports]),
      np.array([len(report.token_ids) for report in reports]),
      num_forwards,
      seconds,
    )

  def verify(self) -> types.StepOutput:
    """Enqueues the target's part."""
    dispatched = time.perf_counter()
    config, params = self._target.config, self._target.params
    if self._proposal is None:
      after = None
      self._target_rows.state, output = spec_step.decode_step(
        params,
        self._pause_params,
        self._target_rows.state,
        config=config,
        drafter=self._pause_drafter,
      )
    else:
      after = 'proposal'
      self._target_rows.state, output = tree_step.verify_step(
        params,
        self._target_rows.state,
        self._proposal,
        config=config,
        num_nodes=self._next.num_nodes,
      )
    self._unread.append(self._next)
    self._num_missed += self._most_tokens(self._next)
    if self._timeline is not None:
      self._timeline.program(
        timeline_lib.TARGET, 'verify', dispatched, output.packed, after
      )
    return output

  def grow(self) -> None:
    """Enqueues the draft forwards that need no verdict."""
    self._grow(self._sizes.current.num_steps)

  def _grow(self, num_steps: int) -> jax.Array:
    return self._draft_rows.grow(num_steps, self._min_mass())

  def follow(self, sizes: tree_sizes.Sizes | None = None) -> None:
    """Enqueues that the draft follows the texts, and makes the next proposal.

    Args:
      sizes: sizes of the proposal; by default what the rounds before suggest.
    """
    self._next = sizes or self._sizes.next()
    self._proposal = None
    if self._next == tree_sizes.PAUSE:
      return
    if self._num_missed > self._tree_config.num_nodes:
      self._catch_up()
    self._num_missed = 0
    self._num_read[:] = self._num_known
    self._proposal = self._advance(self._is_busy)

  def _most_tokens(self, sizes: tree_sizes.Sizes) -> int:
    """Returns how many tokens a row can emit in a round."""
    if sizes == tree_sizes.PAUSE:
      return self._pause_drafter.num_speculative_tokens + 1
    return sizes.num_nodes

  def _advance(self, is_busy: np.ndarray, *, follows: bool = True) -> jax.Array:
    """Enqueues the draft's part and both transfers; returns the proposal."""
    sizes = self._next
    proposal, _ = self._draft_rows.advance(
      self._texts(),
      is_busy,
      np.full(len(is_busy), sizes.num_nodes - 1, np.int32),
      num_steps=sizes.num_steps,
      min_mass=self._min_mass(),
      follows=follows,
    )
    return proposal

  def _catch_up(self) -> None:
    """Enqueues that the draft reads what it has missed of the texts."""
    ends = self._num_known + sum(map(self._most_tokens, self._unread))
    # The last token that was read has no keys and values yet.
    starts = self._num_read - 1
    for slot in np.flatnonzero(self._is_busy).tolist():
      first, end = int(starts[slot]), int(ends[slot])
      chunks = buckets.plan_prefill(end - first, self._draft_rows.capacity)
      for start, size, _ in chunks:
        self._read(slot, first + start, size)

  def _read(self, slot: int, start: int, size: int) -> None:
    """Enqueues that the draft reads a part of a text."""
    rows = self._draft_rows
    rows.read(rows.chunk(slot, start, size, self._texts()))

  def _texts(self) -> Texts:
    state = self._target_rows.state
    features = state.target_cache.features
    return Texts(
      token_ids=state.token_ids,
      lengths=state.lengths,
      features=features,
      page_table=None if features is None else self._row_pages,
      sharding=sharding_lib.replicated(self._target.mesh),
    )

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
    drafter = self._pause_drafter
    trees = self._tree_programs()
    lengths = drafter.lengths if self._tree_config.is_adaptive else ()

    def pause(length, num_known):
      self._target_rows.fill(num_known)
      if isinstance(drafter, AdaptiveLookup):
        self._pause_params = self._on_target(drafter.forcing(length))
      self.follow(tree_sizes.PAUSE)
      return self.verify

    def grow(num_known):
      self._draft_rows.begin_trial(len(self._is_busy), num_known)
      return lambda: self._grow(1)

    seconds = step_timing.median_seconds(
      {
        **trees,
        **{('pause', n): functools.partial(pause, n) for n in lengths},
        'draft': grow,
        'advance': self._prepare_advance,
        'catch_up': self._prepare_catch_up,
      },
      capacity,
      self._states,
    )
    self._target_rows.fill(0)
    return tree_sizes.StepTimes(
      target_seconds={n: seconds[n] for n in trees},
      pause_seconds={n: seconds['pause', n] for n in lengths},
      draft_seconds=seconds['draft'],
      advance_seconds=seconds['advance'],
      catch_up_seconds=seconds['catch_up'],
    )

  def _tree_programs(self) -> dict[int, step_timing.Prepare]:
    """Returns what verifies trees, on idle rows, by their number of nodes."""

    def verify(sizes, num_known):
      self._target_rows.fill(num_known)
      self.follow(sizes)
      return beside_growth if self.is_async else self.verify

    def beside_growth():  # devices may share a processor
      output = self.verify()
      self._grow(self._tree_config.num_draft_steps)
      return output

    return {
      sizes.num_nodes: functools.partial(verify, sizes)
      for sizes in self._compiled_sizes()
      if sizes != tree_sizes.PAUSE
    }

  def _prepare_advance(self, num_known: int) -> Callable[[], jax.Array]:
    is_busy = np.ones_like(self._is_busy)
    self._target_rows.fill(num_known)
    self._draft_rows.begin_trial(len(is_busy), num_known)
    self._next = self._compiled_sizes()[:2][-1]
    return lambda: self._advance(is_busy, follows=False)

  def _prepare_catch_up(self, num_known: int) -> Callable[[], TreeDraftState]:
    def catch_up():
      for slot in range(len(self._is_busy)):
        self._read(slot, num_known - _CATCH_UP, _CATCH_UP)
      return self._draft_rows.state

    return catch_up

  def _states(self) -> tuple[types.DecodeState, TreeDraftState]:
    return self._target_rows.state, self._draft_rows.state

  def _forget_rounds(self) -> None:
    self._unread.clear()
    self._num_missed = 0
    self._forget_proposal()

  def _forget_proposal(self) -> None:
    self._next = self._proposal = None

  def _min_mass(self) -> float | None:
    """Returns what the leaves of a forward must hold, if that is asked."""
    return self._tree_config.min_leaf_mass or None

  def _on_target(self, values: np.ndarray) -> jax.Array:
    return sharding_lib.replicate(values, self._target.mesh)


def _pause_drafter(tree_config: TreeConfig) -> AdaptiveLookup | NoDraft:
  """Returns what goes on while the draft pauses, which it does if adaptive."""
  longest = min(tree_config.num_nodes, _PAUSE_TOKENS) - 1
  if not (tree_config.is_adaptive and tree_config.prompt_lookup and longest):
    return NoDraft()
  return AdaptiveLookup(num_speculative_tokens=longest)
