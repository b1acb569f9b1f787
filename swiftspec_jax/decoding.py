"""Decoding of requests that are all known at the start."""

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence

from swiftspec_jax import errors, left_iterators, policies, types
from swiftspec_jax import timeline as timeline_lib
from swiftspec_jax.config import SamplingParams, TreeConfig
from swiftspec_jax.drafting import Drafter
from swiftspec_jax.engine.rows import RowEngine
from swiftspec_jax.model import Model
from swiftspec_jax.pipelines import Pipeline
from swiftspec_jax.requests import Event, Request
from swiftspec_jax.serving.closed_batch import ClosedBatch
from swiftspec_jax.serving.drafters import make_drafter


class Decoder:
  """Decodes requests with one target, one drafter and `batch_size` rows.

  The caches are as large as the requests at hand need. Models and drafters that
  run on the devices draft in a `RowEngine`, those of serving in a `PageEngine`,
  which also has policies, and chains of models that read features.
  """

  def __init__(
    self,
    target: Model,
    draft: Model | Drafter | make_drafter.PagedDraft | None = None,
    *,
    num_speculative_tokens: int | None = None,
    tree: TreeConfig | None = None,
    policy: policies.Policy | policies.PolicyFn | None = None,
    batch_size: int = 1,
    run_ahead: int = 1,
    timeline: timeline_lib.Timeline | None = None,
  ):
    """Checks that the parts fit; compiles and allocates nothing yet.

    Args:
      target: model that defines the output.
      draft: model or drafter, such as `PromptLookup()`, that speculates; None
        for plain decoding. It may be what only a `PageEngine` has, such as
        `SuffixLookup()`.
      num_speculative_tokens: length of a draft model's chain, or most draft
        tokens of a round in a `PageEngine`; other drafters have their own.
      tree: sizes of the token tree that a draft model grows instead of a
        chain. On the target's devices the two take turns. On others the tree
        grows while the target verifies.
      policy: policy of a `PageEngine`, or what makes one for the sizes that it
        is compiled for, which it does anew when the caches have to grow. It
        says in each round how much to speculate, for any draft that a
        `PageEngine` takes. By default a `PageEngine` drafts as much as it can.
      batch_size: rows that decode together (B).
      run_ahead: rounds that are dispatched before one is read; 0 waits for
        each, and so does a `PageEngine` whose drafts need the text.
      timeline: timeline that notes when the programs of a tree's rounds ran;
        not for a `PageEngine`.

    Raises:
      UserError: the draft has another vocabulary or other devices, or a count
        is out of range.
    """
    self._lock = threading.Lock()  # held by who uses the rows
    self._engine: RowEngine | ClosedBatch
    if (
      policy is not None
      or isinstance(draft, make_drafter.PagedDraft)
      or (tree is None and make_drafter.chains_need_pages(draft))
    ):
      if timeline is not None:
        raise errors.UserError(
          'timeline is for draft models without a policy; leave it out'
        )
      self._engine = ClosedBatch(
        target,
        make_drafter.with_tree(draft, tree),
        num_speculative_tokens=num_speculative_tokens,
        policy=policy,
        batch_size=batch_size,
        run_ahead=run_ahead,
      )
      return
    self._engine = RowEngine(
      target,
      draft,
      num_speculative_tokens=num_speculative_tokens,
      tree=tree,
      max_rows=batch_size,
      run_ahead=run_ahead,
      timeline=timeline,
    )

  @property
  def pipeline(self) -> Pipeline:
    """The states on the devices, and the programs of a round."""
    return self._row_engine.pipeline

  @property
  def _row_engine(self) -> RowEngine:
    if not isinstance(self._engine, RowEngine):
      raise errors.UserError(
        'a decoder over pages enqueues no rounds by itself; use `run`'
      )
    return self._engine

  @property
  def host_seconds(self) -> float:
    """Sum of `StepRecord.host_seconds`: work of the host, waits excluded."""
    return self._engine.host_seconds

  def run(self, requests: Sequence[Request]) -> Iterator[Event]:
    """Decodes requests; yields news of each as it becomes certain.

    Closing the iterator early stops the decoding. A decoder has rows for one
    iterator at a time.

    Raises:
      UserError: an empty prompt, a prompt that leaves no room in the
        context, or a token id outside the vocabulary; at the call, not at
        the first event. At the first event: an earlier iterator of this
        decoder has not ended.
    """
    limits = [self._engine.check(request) for request in requests]
    return self._run(requests, max(limits)) if requests else iter(())

  @left_iterators.closed_at_exit
  def _run(
    self, requests: Sequence[Request], limit: int
  ) -> Generator[Event, None, None]:
    with self._own_rows():
      self._engine.prepare(limit, [request.sampling for request in requests])
      waiting = {
        index: (self._engine.submit(request), 0)
        for index, request in enumerate(requests)
      }
      while waiting:
        self._engine.step()
        for index, (handle, num_seen) in list(waiting.items()):
          if handle.num_updates > num_seen:
            waiting[index] = handle, handle.num_updates
            text, result = handle.latest.text, handle.latest.result
            if result is not None:
              del waiting[index]
            if text or result is not None:
              yield Event(index=index, text=text, result=result)

  @contextlib.contextmanager
  def _own_rows(self) -> Iterator[None]:
    """Keeps the rows from other users until it ends; they are idle then."""
    if not self._lock.acquire(blocking=False):
      raise errors.UserError(
        'this decoder is busy with another iterator of `run`; read that to its '
        'end or `close()` it first, or take another decoder'
      )
    with contextlib.ExitStack() as at_the_end:
      at_the_end.callback(self._lock.release)
      # The surplus must not delay whoever comes next.
      at_the_end.callback(self._engine.drain)
      at_the_end.callback(self._engine.cancel_all)
      yield

  def dispatch(self) -> types.StepOutput:
    """Enqueues one round, as `RowEngine.dispatch` does."""
    return self._row_engine.dispatch()

  def warmup(
    self,
    max_total_tokens: int,
    sampling: SamplingParams = SamplingParams(),
  ) -> None:
    """Compiles all that requests of up to `max_total_tokens` can need.

    Args:
      max_total_tokens: tokens of a prompt and its output together.
      sampling: parameters that use the same features as the requests to come.

    Raises:
      UserError: an iterator of this decoder has not ended.
    """
    with self._own_rows():
      limit = min(max_total_tokens, self._engine.max_context)
      self._engine.warm_up_to(limit, sampling)
