"""Figures of a server for Prometheus.

What vLLM has, too, has its name there.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import prometheus_client

from swiftspec_jax import tree
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.requests.results import GenerationResult, GenerationStats

_LABEL = 'model_name'

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

_OF_ENGINE: dict[str, tuple[str, Callable[[Engine], float]]] = {
  'vllm:num_programs': (
    'Programs of the engine.',
    lambda engine: engine.programs.num_programs,
  ),
  'vllm:num_compiled_programs': (
    'Of them compiled; drafts wait for those of their steps.',
    lambda engine: engine.programs.num_compiled,
  ),
  'vllm:num_requests_running': (
    'Requests with a slot.',
    lambda engine: engine.scheduler.num_running,
  ),
  'vllm:num_requests_waiting': (
    'Requests without a slot.',
    lambda engine: max(0, engine.num_requests - engine.scheduler.num_running),
  ),
  'vllm:kv_cache_usage_perc': (
    'Share of the KV cache that is in use, 0 to 1.',
    lambda engine: engine.cache_usage,
  ),
}
# Of requests with an output; the others only have their prompt rated.
_TIMES: dict[str, tuple[str, Callable[[GenerationStats], float | None]]] = {
  'vllm:time_to_first_token_seconds': (
    'From arrival to the first token.',
    lambda stats: stats.ttft_seconds,
  ),
  'vllm:request_time_per_output_token_seconds': (
    'For a token after the first, averaged over a request.',
    lambda stats: stats.tpot_seconds,
  ),
  'vllm:e2e_request_latency_seconds': (
    'From arrival to the last token.',
    lambda stats: stats.latency_seconds,
  ),
}

_SECONDS = tuple(
  round(digit * 10.0**power, 3)
  for power in range(-3, 3)
  for digit in (1, 2.5, 5)
)
_OUTCOMES = {tree.MISS: 'miss', tree.LATE_HIT: 'late_hit', tree.HIT: 'hit'}


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
    for gauge, value in self._all(prometheus_client.Gauge, _OF_ENGINE):
      gauge.set_function(functools.partial(value, engine))
    self._of_steps = self._all(prometheus_client.Counter, OF_STEPS)
    self._of_results = self._all(prometheus_client.Counter, OF_RESULTS)
    histogram = functools.partial(prometheus_client.Histogram, buckets=_SECONDS)
    self._times = self._all(histogram, _TIMES)
    self._itl = self._make(
      histogram,
      'vllm:inter_token_latency_seconds',
      'Between two outputs of a request, each of one token or several.',
    )
    counter = functools.partial(self._make, prometheus_client.Counter)
    self._generation_tokens = counter(
      'vllm:generation_tokens', 'Tokens of outputs.'
    )
    self._preemptions = counter(
      'vllm:num_preemptions', 'Times that a request has lost its slot.'
    )
    self._ended = counter(
      'vllm:request_success',
      'Requests that have ended; abort: their client has gone.',
      'finished_reason',
    )
    self._outcomes = self._numbered(
      'swiftspec:spec_decode_num_tree_verdicts',
      'Verdicts on persistent trees: whether the last verified token was in '
      'the tree and expanded (hit), not yet expanded (late_hit), or not in it '
      '(miss).',
      'outcome',
      [_OUTCOMES[outcome] for outcome in sorted(_OUTCOMES)],
    )
    longest = engine.max_draft_tokens
    self._accepted_at = self._numbered(
      'vllm:spec_decode_num_accepted_tokens_per_pos',
      'Drafts of which the token at a position is part of an output.',
      'position',
      range(longest),
    )
    self._drafted_at = self._numbered(
      'swiftspec:spec_decode_num_draft_tokens_per_pos',
      'Drafts that had a token at a position, in trees a node of that depth.',
      'position',
      range(longest),
    )
    self._of_length = self._numbered(
      'swiftspec:spec_decode_num_rounds_per_length',
      'Rounds by the number of draft tokens that they verified.',
      'length',
      range(longest + 1),
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
    for histogram, time_of in self._times if stats.new_tokens else ():
      if (seconds := time_of(stats)) is not None:
        histogram.observe(seconds)

  def _make(self, kind: Callable[..., Any], name: str, text: str, *labels: str):
    made = kind(name, text, (_LABEL, *labels), registry=self.registry)
    return made if labels else made.labels(self._model)

  def _all(self, kind: Callable[..., Any], table: Mapping[str, tuple]):
    """Returns the figures of a table with their functions."""
    return [
      (self._make(kind, name, text), value)
      for name, (text, value) in table.items()
    ]

  def _numbered(self, name: str, text: str, label: str, values: Iterable[Any]):
    """Returns a counter for each value of a label."""
    made = self._make(prometheus_client.Counter, name, text, label)
    return [made.labels(self._model, str(value)) for value in values]
