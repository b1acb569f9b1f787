"""The programs of an engine: which are compiled, and which one a step takes.

An engine can serve before all of its programs are compiled. One that every step
fits into is compiled first, for greedy requests; the others follow in a thread,
the most useful ones first. While the program of a step is missing, the smallest
one that the step fits into stands in for it. So no step waits for a
compilation, but those of the first sampled requests.

Drafts wait until all programs are there that a step with drafts could need, as
a policy compares the times of these very programs.

Kernels of one CPU do no work for padding. There a few programs stand in for all
others for good.
"""

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from itertools import pairwise

import tqdm

from swiftspec_jax import policies
from swiftspec_jax.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.engine import warm_up
from swiftspec_jax.models import attention
from swiftspec_jax.runtime import hosts
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_sampling import SamplingLevel
from swiftspec_jax.step.target import Target

_OTHER_LEVELS = [x for x in SamplingLevel if x != SamplingLevel.GREEDY]
_NUM_THREADS = 2  # as XLA compiles a program for CPUs in one


@dataclasses.dataclass(frozen=True)
class _Program:
  """What the target or the drafter runs for some sizes.

  Attributes:
    flat: the sizes.
    least_rows: padded rows of the smallest step that takes it.
    is_draft: whether the drafter runs it.
  """

  flat: StepSizes
  least_rows: int
  is_draft: bool = False


class Programs:
  """Compiles the programs of an engine; runs none of them.

  Unless `compile_all` or `start` is called, a program is compiled by the first
  step that takes it.

  Attributes:
    num_programs: number of programs.
    num_compiled: number of programs that `compile_all` or `start` has compiled.
    is_warming_up: whether programs stand in for others that are not compiled
      yet.
    error: exception of a compilation in the background; None if there is none.
  """

  def __init__(
    self,
    sizes: ProgramSizes,
    target: Target,
    drafters: Sequence[EngineDrafter],
  ):
    """Compiles nothing yet.

    Args:
      sizes: declared.
      target: target of the engine.
      drafters: drafters of the engine.
    """
    self._sizes = sizes
    self._target = target.compiling()
    self._drafters = [drafter.compiling() for drafter in drafters]
    has_programs = any(drafter.has_programs for drafter in drafters)
    model = target.model
    self._has_few = attention.is_native(model.config, model.mesh)
    self._programs, self._num_first = _in_order(
      sizes, has_few=self._has_few, has_drafts=has_programs
    )
    self.num_programs = len(self._programs)
    self.num_compiled = 0
    self.is_warming_up = False
    self._num_ready: int | None = None
    self.error: BaseException | None = None
    self._is_stopped = threading.Event()
    self._drafters_lock = threading.Lock()
    self._is_idle: Callable[[], bool] = lambda: True
    self._thread = threading.Thread(target=self._compile_rest, daemon=True)

  @property
  def num_ready(self) -> int | None:
    """How many of them, the first ones, steps may take now; None for all."""
    return self.num_compiled if self.is_warming_up else None

  def take(self, num_ready: int | None) -> None:
    """Lets steps take a `num_ready` that this or another process has had."""
    self._num_ready = num_ready

  def compile_all(
    self,
    levels: Iterable[SamplingLevel] = tuple(SamplingLevel),
    *,
    has_grammar: bool = False,
    show_progress: str | None = None,
  ) -> None:
    """Compiles everything, several programs at a time, and waits.

    Args:
      levels: levels of sampling of the requests to come.
      has_grammar: whether their outputs may follow grammars.
      show_progress: label of a bar on standard error, None for no bar.
    """
    drafts = [x.flat for x in self._programs if x.is_draft]
    self._target.warm_up()
    pool = futures.ThreadPoolExecutor(_NUM_THREADS)
    try:
      jobs = [pool.submit(lambda: [*map(self._warm_up_drafters, drafts)])]
      jobs += [
        pool.submit(self._compile_step, flat, levels, has_grammar=has_grammar)
        for flat in self.steps()
      ]
      for job in tqdm.tqdm(
        futures.as_completed(jobs),
        show_progress,
        total=len(jobs),
        unit='size',
        disable=show_progress is None,
      ):
        job.result()
    finally:
      pool.shutdown(wait=False, cancel_futures=True)
    hosts.exchange(None)  # no process may take them before all have them
    self.num_compiled = len(self._programs)

  def start(self, is_idle: Callable[[], bool] = lambda: True) -> None:
    """Compiles what first requests need; a thread compiles the others.

    Every step of greedy requests fits into what this has compiled when it
    returns.

    Args:
      is_idle: whether nobody else needs the processors, so that the thread may
        have several programs compiled at a time.
    """
    self._is_idle = is_idle
    self._target.warm_up()
    self._compile_together(
      self._programs[: self._num_first], [SamplingLevel.GREEDY]
    )
    self.is_warming_up = True
    self.take(self.num_ready)
    self._thread.start()

  def stop(self) -> None:
    """Has the thread end; does not wait for what is being compiled."""
    self._is_stopped.set()

  def join(self, timeout: float | None = None) -> bool:
    """Waits for the thread; returns whether it has ended.

    Args:
      timeout: seconds to wait; None for any time.
    """
    if self._thread.is_alive():
      self._thread.join(timeout)
    return not self._thread.is_alive()

  def fit(self, flat: StepSizes) -> StepSizes:
    """Returns the sizes of the program that a step takes.

    Args:
      flat: declared sizes for the step.

    Raises:
      BaseException: what a compilation in the thread has raised.
    """
    if self.error is not None:
      raise self.error
    if self._num_ready is None and not self._has_few:
      return flat
    ready = self._programs[: self._num_ready]
    return min(
      (p.flat for p in ready if not p.is_draft and _covers(p.flat, flat)),
      key=lambda found: (
        found.num_tokens,
        found.context,
        found.num_rows,
        found.block_size,
      ),
    )

  def can_draft(self, view: policies.StepView) -> bool:
    """Returns whether all programs of steps with drafts are there."""
    if self._num_ready is None or not view.num_rows:
      return True
    config = self._sizes.scheduler
    longest = int((view.kv_lengths + view.num_ahead).max()) + 1
    longest += config.buckets.max_length
    context = self._sizes.context_of(min(longest, config.max_context))
    num_rows = config.buckets.pad_rows(view.num_rows)
    return not any(
      program.least_rows <= num_rows and program.flat.context <= context
      for program in self._programs[self._num_ready :]
    )

  def steps(self) -> list[StepSizes]:
    """Returns the sizes of the target's programs."""
    return [x.flat for x in self._programs if not x.is_draft]

  def _compile_rest(self) -> None:
    try:
      for program in self._programs[: self._num_first]:
        self._compile_step(program.flat, _OTHER_LEVELS)
      rest = self._programs[self._num_first :]
      while rest:
        if self._is_stopped.is_set():
          return
        num_now = _NUM_THREADS if self._is_idle() else 1
        now, rest = rest[:num_now], rest[num_now:]
        self._compile_together(now)
    except BaseException as error:
      self.error = error
      raise
    self.is_warming_up = False

  def _compile_together(
    self,
    programs: Sequence[_Program],
    levels: Iterable[SamplingLevel] = SamplingLevel,
  ) -> None:
    """Compiles programs, each in a thread of its own, and counts them."""
    compile_fn = functools.partial(self._compile, levels=levels)
    with futures.ThreadPoolExecutor(len(programs)) as pool:
      for _ in pool.map(compile_fn, programs):
        hosts.exchange(None)  # no process may take it before all have it
        self.num_compiled += 1

  def _compile(
    self, program: _Program, levels: Iterable[SamplingLevel]
  ) -> None:
    flat = program.flat
    if program.is_draft:
      self._warm_up_drafters(flat)
    else:
      self._compile_step(flat, levels)

  def _warm_up_drafters(self, flat: StepSizes) -> None:
    with self._drafters_lock:  # sizes share programs
      for drafter in self._drafters:
        drafter.warm_up(flat)

  def _compile_step(
    self,
    flat: StepSizes,
    levels: Iterable[SamplingLevel],
    *,
    has_grammar: bool = False,
  ) -> None:
    step = warm_up.made_up_step(flat, self._sizes.range_of(flat.context)[1])
    run = functools.partial(
      warm_up.run_step, self._sizes, copy.copy(self._target), flat, step
    )
    for level in levels:
      for search in warm_up.searches(flat, self._drafters):
        run(level, *search)
      if has_grammar:
        run(level, has_grammar=True)


def _all(sizes: ProgramSizes) -> tuple[list[_Program], list[_Program]]:
  """Returns plain and other programs, one for each of the declared sizes."""
  plain, mixed = sizes.all_plain(), sizes.all_mixed()
  return (
    [_Program(flat, least_rows=flat.num_rows) for flat in plain],
    [_Program(flat, least_rows=flat.num_rows) for flat in mixed],
  )


def _few(sizes: ProgramSizes) -> tuple[list[_Program], list[_Program]]:
  """Returns plain and other programs that steps of all sizes fit into.

  Padding takes a little time: SmolLM2 takes 10 % more for one row in a plain
  step of 8, and 7 % for two.
  """
  rows = sizes.scheduler.buckets.rows
  kept = [rows[0]]
  for size in rows[1:]:
    if size == rows[-1] or size >= 8 * kept[-1]:
      kept.append(size)
  least_rows = {size: fewer + 1 for fewer, size in pairwise((0, *kept))}
  # Those with most rows are the last ones.
  mixed = {(x.num_tokens, x.context): x for x in sizes.all_mixed()}
  drafted = [x.num_tokens for x in mixed.values() if x.has_draft_blocks]
  return (
    [
      _Program(flat, least_rows=least_rows[flat.num_rows])
      for flat in sizes.all_plain()
      if flat.num_rows in least_rows
    ],
    [
      _Program(mixed[key], least_rows=1)
      for key in sorted(mixed)
      if not drafted or key[0] >= max(drafted)
    ],
  )


def _in_order(
  sizes: ProgramSizes, *, has_few: bool, has_drafts: bool
) -> tuple[list[_Program], int]:
  """Returns all programs, the most useful ones first.

  Args:
    sizes: declared.
    has_few: whether a few programs of the target are enough.
    has_drafts: whether drafters have programs, too.

  Returns:
    The programs, and how many of them the first requests need: every step fits
    into one of these.
  """
  plain, mixed = _few(sizes) if has_few else _all(sizes)
  first = [*mixed[-1:]]
  if not (mixed and _covers(mixed[-1].flat, plain[-1].flat)):
    first.append(plain[-1])
  # A stand-in for the step of one row that decodes would be much too slow.
  first.append(plain[0])
  drafts = [
    _Program(flat, least_rows=flat.num_rows, is_draft=True)
    for flat in sizes.all_mixed()
    if has_drafts and flat.block_size > 1
  ]
  # Then few rows with short contexts; plain steps have the fewest tokens.
  rest = sorted(
    [*plain, *mixed, *drafts],
    key=lambda x: (
      x.least_rows * x.flat.context,
      x.least_rows,
      x.flat.num_tokens,
      x.is_draft,
    ),
  )
  programs = [*first, plain[-1], *rest]
  return list(dict.fromkeys(programs)), len(set(first))


def _covers(flat: StepSizes, other: StepSizes) -> bool:
  """Returns whether every step of the other sizes fits into some."""
  return (
    flat.num_rows >= other.num_rows
    and flat.num_tokens >= other.num_tokens
    and flat.context >= other.context
    and flat.block_size >= other.block_size
    and flat.has_drafts >= other.has_drafts
  )
