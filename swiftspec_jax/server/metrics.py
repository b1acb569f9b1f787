"""Figures of a server for Prometheus, under the names that vLLM gives them."""

from collections.abc import Callable

import numpy as np
import prometheus_client

from swiftspec_jax import tree
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.results import GenerationResult

_LABEL = 'model_name'
# What vLLM has, too, has its name there.
_THEIRS, _OURS = 'vllm', 'swiftspec'

# Counters by name, with what they count, and what is added to them for an
# ended request or for a step. More may be added before a server is made.
OF_RESULTS: dict[str, tuple[str, Callable[[GenerationResult], float]]] = {
  'vllm:prompt_tokens': (
    'Tokens of the prompts of requests that have ended.',
    lambda result: result.stats.prompt_tokens,
  ),
}
OF_STEPS: dict[str, tuple[str, Callable[[StepRecord], float]]] = {
  'vllm:spec_decode_num_drafts': (
    'Drafts that were verified.',
    lambda record: np.count_nonzero(record.lengths),
  ),
  'vllm:spec_decode_num_draft_tokens': (
    'Draft tokens that were verified.',
    lambda record: int(record.lengths.sum()),
  ),
  'vllm:spec_decode_num_accepted_tokens': (
    'Draft tokens that are part of an output.',
    lambda record: int(record.num_accepted.sum()),
  ),
  'swiftspec:step_seconds': (
    'Duration of all steps.',
    lambda record: record.seconds,
  ),
  'swiftspec:step_host_seconds': (
    'Processor time of the thread that runs the steps.',
    lambda record: record.host_seconds,
  ),
  'swiftspec:grammar_steps': (
    'Steps in which an output followed a grammar; each was read before the '
    'next, whatever run_ahead says.',
    lambda record: record.has_grammar,
  ),
  'swiftspec:spec_decode_num_draft_forwards_waited': (
    "Forwards of a persistent tree's draft for which the target waited.",
    lambda record: record.num_forwards,
  ),
}

_SECONDS = tuple(
  round(digit * 10.0**power, 3)
  for power in range(-3, 3)
  for digit in (1, 2.5, 5)
)


class Metrics:
  """Counts steps, and what comes of requests.

  Attributes:
    registry: registry of these figures alone.
  """

  def __init__(self, engine: Engine, model: str):
    """All counts are 0.

    Args:
      engine: engine whose queue and cache are looked at.
      model: label of the figures.
    """
    self.registry = prometheus_client.CollectorRegistry()
    self._model = model
    self._engine = engine
    self._num_preemptions = engine.scheduler.num_preemptions
    for name, help_text, value in (
      (
        'num_programs',
        'Programs of the engine.',
        lambda: engine.programs.num_programs,
      ),
      (
        'num_compiled_programs',
        'Of them compiled; drafts wait for those of their steps.',
        lambda: engine.programs.num_compiled,
      ),
      (
        'num_requests_running',
        'Requests with a slot.',
        lambda: engine.scheduler.num_running,
      ),
      (
        'num_requests_waiting',
        'Requests without a slot.',
        lambda: max(0, engine.num_requests - engine.scheduler.num_running),
      ),
      (
        'kv_cache_usage_perc',
        'Share of the KV cache that is in use, 0 to 1.',
        lambda: engine.cache_usage,
      ),
    ):
      self._gauge(name, help_text, value)
    self._add_steps(engine.max_draft_tokens)
    self._add_requests()

  def _add_steps(self, max_length: int) -> None:
    self._preemptions = self._counter(
      'num_preemptions', 'Times that a request has lost its slot.'
    )
    self._of_steps = self._counters(OF_STEPS)
    outcomes = self._metric(
      prometheus_client.Counter,
      'spec_decode_num_tree_verdicts',
      'Verdicts on persistent trees: whether the last verified token was in '
      'the tree and expanded (hit), not yet expanded (late_hit), or not in it '
      '(miss).',
      'outcome',
      prefix=_OURS,
    )
    self._outcomes = [
      outcomes.labels(self._model, name)
      for _, name in sorted(
        {tree.MISS: 'miss', tree.LATE_HIT: 'late_hit', tree.HIT: 'hit'}.items()
      )
    ]
    self._accepted_at = self._numbered(
      'spec_decode_num_accepted_tokens_per_pos',
      'Drafts of which the token at a position is part of an output.',
      'position',
      max_length,
    )
    self._drafted_at = self._numbered(
      'spec_decode_num_draft_tokens_per_pos',
      'Drafts that had a token at a position, in trees a node of that depth.',
      'position',
      max_length,
      prefix=_OURS,
    )
    self._of_length = self._numbered(
      'spec_decode_num_rounds_per_length',
      'Rounds by the number of draft tokens that they verified.',
      'length',
      max_length + 1,
      prefix=_OURS,
    )

  def _add_requests(self) -> None:
    self._of_results = self._counters(OF_RESULTS)
    self._generation_tokens = self._counter(
      'generation_tokens', 'Tokens of outputs.'
    )
    self._ended = self._metric(
      prometheus_client.Counter,
      'request_success',
      'Requests that have ended; abort: their client has gone.',
      'finished_reason',
    )
    self._ttft = self._histogram(
      'time_to_first_token_seconds', 'From arrival to the first token.'
    )
    self._itl = self._histogram(
      'inter_token_latency_seconds',
      'Between two outputs of a request, each of one token or several.',
    )
    self._tpot = self._histogram(
      'request_time_per_output_token_seconds',
      'For a token after the first, averaged over a request.',
    )
    self._e2e = self._histogram(
      'e2e_request_latency_seconds', 'From arrival to the last token.'
    )

  def note_step(self, record: StepRecord) -> None:
    """Counts drafts; for the thread of the engine."""
    for counter, count in self._of_steps:
      counter.inc(count(record))
    for counter, count in zip(self._outcomes, record.outcomes, strict=True):
      counter.inc(int(count))
    for counters, numbers in (
      (self._accepted_at, record.num_accepted),
      (self._drafted_at, record.num_levels),
    ):
      for i, counter in enumerate(counters):
        counter.inc(np.count_nonzero(numbers > i))
    for i, counter in enumerate(self._of_length):
      counter.inc(np.count_nonzero(record.lengths == i))
    num_preemptions = self._engine.scheduler.num_preemptions
    self._preemptions.inc(num_preemptions - self._num_preemptions)
    self._num_preemptions = num_preemptions

  def note_update(self, update: Update, gap: float | None) -> None:
    """Counts tokens, and the request if it ends.

    Args:
      update: news of a request.
      gap: seconds since the one before, None for the first.
    """
    self._generation_tokens.inc(len(update.token_ids))
    if gap is not None:
      self._itl.observe(gap)
    if update.result is not None:
      self._note_result(update.result)

  def note_abort(self) -> None:
    """Counts a request whose client has gone."""
    self._ended.labels(self._model, 'abort').inc()

  def _note_result(self, result: GenerationResult) -> None:
    stats = result.stats
    self._ended.labels(self._model, result.finish_reason).inc()
    for counter, count in self._of_results:
      counter.inc(count(result))
    if stats.new_tokens:  # the others only have their prompt rated
      self._ttft.observe(stats.ttft_seconds)
      self._e2e.observe(stats.latency_seconds)
    if stats.tpot_seconds is not None:
      self._tpot.observe(stats.tpot_seconds)

  def _metric(self, kind, name, help_text, *labels, prefix=_THEIRS, **options):
    return kind(
      f'{prefix}:{name}',
      help_text,
      (_LABEL, *labels),
      registry=self.registry,
      **options,
    )

  def _numbered(self, name, help_text, label, count, prefix=_THEIRS):
    """Returns a counter for each of the numbers below `count`."""
    counters = self._metric(
      prometheus_client.Counter, name, help_text, label, prefix=prefix
    )
    return [counters.labels(self._model, str(i)) for i in range(count)]

  def _counters(self, table):
    """Returns the counters of a table with their functions."""
    return [
      (self._counter(name, help_text, prefix), count)
      for full_name, (help_text, count) in table.items()
      for prefix, name in [full_name.split(':')]
    ]

  def _counter(
    self, name: str, help_text: str, prefix: str = _THEIRS
  ) -> prometheus_client.Counter:
    counter = self._metric(
      prometheus_client.Counter, name, help_text, prefix=prefix
    )
    return counter.labels(self._model)

  def _histogram(
    self, name: str, help_text: str
  ) -> prometheus_client.Histogram:
    histogram = self._metric(
      prometheus_client.Histogram, name, help_text, buckets=_SECONDS
    )
    return histogram.labels(self._model)

  def _gauge(
    self, name: str, help_text: str, value: Callable[[], float]
  ) -> None:
    gauge = self._metric(prometheus_client.Gauge, name, help_text)
    gauge.labels(self._model).set_function(value)
