"""Figures of a server for Prometheus, under the names that vLLM gives them."""

from collections.abc import Callable

import numpy as np
import prometheus_client

from swiftspec_jax.results import GenerationResult
from swiftspec_jax.serving.engine import Engine, StepRecord
from swiftspec_jax.serving.handles import Update

_LABEL = 'model_name'
_SECONDS = tuple(
  round(digit * 10.0**power, 3)
  for power in range(-3, 3)
  for digit in (1, 2.5, 5)
)


class Metrics:
  """Counts steps, and what comes of requests.

  Attributes:
    registry: of these figures alone.
  """

  def __init__(self, engine: Engine, model: str):
    """All counts are 0.

    Args:
      engine: whose queue and cache are looked at.
      model: label of the figures.
    """
    self.registry = prometheus_client.CollectorRegistry()
    self._model = model
    self._scheduler = scheduler = engine.scheduler
    self._num_preemptions = scheduler.num_preemptions
    for name, help_text, value in (
      (
        'num_requests_running',
        'Requests with a slot.',
        lambda: scheduler.num_running,
      ),
      (
        'num_requests_waiting',
        'Requests without a slot.',
        lambda: max(0, engine.num_requests - scheduler.num_running),
      ),
      (
        'kv_cache_usage_perc',
        'Share of the pages that are in use, 0 to 1.',
        lambda: 1 - scheduler.num_free_pages / scheduler.config.num_pages,
      ),
    ):
      self._gauge(name, help_text, value)
    self._add_steps(scheduler.config.buckets.max_length)
    self._add_requests()

  def _add_steps(self, max_length: int) -> None:
    self._preemptions = self._counter(
      'num_preemptions', 'Times that a request has lost its slot.'
    )
    self._drafts = self._counter(
      'spec_decode_num_drafts', 'Drafts that were verified.'
    )
    self._draft_tokens = self._counter(
      'spec_decode_num_draft_tokens', 'Draft tokens that were verified.'
    )
    self._accepted = self._counter(
      'spec_decode_num_accepted_tokens',
      'Draft tokens that are part of an output.',
    )
    per_position = self._metric(
      prometheus_client.Counter,
      'spec_decode_num_accepted_tokens_per_pos',
      'Drafts of which the token at a position is part of an output.',
      'position',
    )
    self._accepted_at = [
      per_position.labels(self._model, str(i)) for i in range(max_length)
    ]

  def _add_requests(self) -> None:
    self._prompt_tokens = self._counter(
      'prompt_tokens', 'Tokens of the prompts of requests that have ended.'
    )
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
      'For a token behind the first, averaged over a request.',
    )
    self._e2e = self._histogram(
      'e2e_request_latency_seconds', 'From arrival to the last token.'
    )

  def note_step(self, record: StepRecord) -> None:
    """Counts drafts; for the thread of the engine."""
    decoding = slice(record.step.num_decoding)
    lengths = record.step.lengths[decoding]
    accepted = record.num_accepted[decoding]
    self._drafts.inc(np.count_nonzero(lengths))
    self._draft_tokens.inc(int(lengths.sum()))
    self._accepted.inc(int(accepted.sum()))
    for i, counter in enumerate(self._accepted_at):
      counter.inc(np.count_nonzero(accepted > i))
    num_preemptions = self._scheduler.num_preemptions
    self._preemptions.inc(num_preemptions - self._num_preemptions)
    self._num_preemptions = num_preemptions

  def note_update(self, update: Update, gap: float | None) -> None:
    """Counts tokens, and the request if it ends.

    Args:
      update: of a request.
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
    self._prompt_tokens.inc(stats.prompt_tokens)
    self._ttft.observe(stats.ttft_seconds)
    self._e2e.observe(stats.ttft_seconds + stats.decode_seconds)
    if stats.new_tokens > 1:
      self._tpot.observe(stats.decode_seconds / (stats.new_tokens - 1))

  def _metric(self, kind, name, help_text, *labels, **options):
    return kind(
      f'vllm:{name}',
      help_text,
      (_LABEL, *labels),
      registry=self.registry,
      **options,
    )

  def _counter(self, name: str, help_text: str) -> prometheus_client.Counter:
    counter = self._metric(prometheus_client.Counter, name, help_text)
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
