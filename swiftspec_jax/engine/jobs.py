"""Requests of an engine, and what has come of them."""

import math
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from swiftspec_jax import errors, requests
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.drafters import draft_nodes
from swiftspec_jax.engine.handles import Handle, Update
from swiftspec_jax.models.model import Model
from swiftspec_jax.requests import (
  Piece,
  Request,
  Source,
  grammar,
  results,
  source_of,
)
from swiftspec_jax.runtime import profiling
from swiftspec_jax.scheduling import page_table
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step import slot_trees
from swiftspec_jax.step.verdicts import Verdicts
from swiftspec_jax.tree import types

if TYPE_CHECKING:
  import llguidance


def check(request: Request, model: Model, config: SchedulerConfig) -> None:
  """Raises UserError for a request that an engine cannot serve."""
  requests.check(request, model, config.max_context, 'this engine')
  if request.sampling.structured_outputs and jax.process_count() > 1:
    raise errors.UserError(
      f'structured_outputs is for engines of one process, and this one has '
      f'{jax.process_count()}; leave it out'
    )
  config.check(
    len(request.token_ids), max_new_tokens(request, config.max_context)
  )


def max_new_tokens(request: Request, max_context: int) -> int:
  """Returns the number of tokens at which an output must end."""
  most = max_context - len(request.token_ids)
  return min(request.sampling.max_new_tokens or most, most)


class Job:
  """A request, its output, the handle of its user, and the keys of its pages.

  Attributes:
    request: prompt, and how to continue it.
    handle: handle that gets the news.
    max_speculative_tokens: longest draft that the user wants, None for any.
    shows_drafts: whether the news have `draft_nodes`.
    max_new_tokens: number of tokens at which the output must end.
    limit: the same, prompt included.
    token_ids: the output so far.
    is_finished: whether the output is complete.
    matcher: place of the output in its grammar; None without a grammar.
  """

  shows_drafts = False

  def __init__(
    self,
    request: Request,
    handle: Handle,
    model: Model,
    config: SchedulerConfig,
    max_speculative_tokens: int | None,
  ):
    """Starts the clock of the first token."""
    sampling = request.sampling
    self.request = request
    self.handle = handle
    self.max_speculative_tokens = max_speculative_tokens
    self.max_new_tokens = max_new_tokens(request, config.max_context)
    self.limit = len(request.token_ids) + self.max_new_tokens
    self.token_ids: list[int] = []
    self.is_finished = False
    wanted = sampling.structured_outputs
    self.matcher: llguidance.LLMatcher | None = (
      None if wanted is None else grammar.start(wanted, model)
    )
    self._page_size = config.page_size if config.shares_prefixes else None
    self._num_paged = 0  # tokens in pages whose keys are known
    self._last_key = b''
    self._eos_token_ids = (
      () if sampling.ignore_eos else model.config.eos_token_ids
    )
    self._stream = tokenizer_lib.TextStream(
      model.tokenizer,
      sampling.stop,
      min_tokens=sampling.min_tokens,
      include_stop=sampling.include_stop_str_in_output,
      skip_special_tokens=sampling.skip_special_tokens,
      follows=request.token_ids,
    )
    self._stop_reason: int | str | None = None
    self._logprobs: list[float] = []
    self._top_logprobs: list[results.TopLogprobs] = []
    self._lengths: list[int] = []  # draft tokens of each round
    self._num_tree_rounds = 0
    self._num_forwards = 0
    self._outcomes = np.zeros(tree_lib.NUM_OUTCOMES, int)
    self._drafted = np.zeros(config.buckets.max_length, int)
    self._accepted = np.zeros(config.buckets.max_length, int)
    self._start_time = time.perf_counter()
    self._first_token_time = math.nan
    self._num_first = 0  # tokens of the first step

  @property
  def request_id(self) -> int:
    """Unique in the engine."""
    return self.handle.request_id

  @property
  def num_known(self) -> int:
    """Tokens of prompt and output."""
    return len(self.request.token_ids) + len(self.token_ids)

  def known_tokens(self) -> list[int]:
    """Returns prompt and output."""
    return [*self.request.token_ids, *self.token_ids]

  def new_page_keys(self) -> list[bytes]:
    """Returns the keys of the pages that were filled since the last call."""
    if self._page_size is None:
      return []
    if self.num_known - self._num_paged < self._page_size:
      return []
    token_ids = self.known_tokens()[self._num_paged :]
    keys = page_table.keys_of(token_ids, self._page_size, self._last_key)
    self._num_paged += len(keys) * self._page_size
    self._last_key = keys[-1]
    return keys

  def push(
    self,
    verdict: Verdicts,
    num_drafted: int,
    logprobs: types.Logprobs | None,
    drafted: np.ndarray | None,
    news: np.ndarray | None,
    *,
    by_model: bool,
  ) -> list[int]:
    """Takes the verdict of a step; returns the new tokens of the output.

    Args:
      verdict: verdict on the drafts of the slot.
      num_drafted: draft tokens that were verified.
      logprobs: log-probabilities of the slot on the host, without the leading
        axis.
      drafted: chain i32[K], or packed `types.TreeProposal` of the slot, if
        anybody wants to see drafts.
      news: nodes, outcome and forwards as in `verdicts_of`, if there are.
      by_model: whether a model has drafted what did not come of a text.
    """
    end, tree = int(verdict.num_accepted) + 1, verdict.tree
    path, is_looked_up = list(range(end)), [False] * end
    if tree is not None:
      path = tree.path[:end].tolist()
      is_looked_up = tree.is_looked_up[:end].tolist()
    if self.token_ids or num_drafted:  # else a prompt has been read
      self._count_round(verdict, num_drafted, news)
    if not self.token_ids:
      self._first_token_time = time.perf_counter()
      self._num_first = end
    num_before = len(self.token_ids)
    texts, finish_reason = self._append(verdict.token_ids[:end].tolist())
    count = len(self.token_ids) - num_before
    if logprobs is not None:
      self._note_logprobs(logprobs, count)
    nodes = ()
    if self.shows_drafts and num_drafted:
      if tree is None:
        drafted = slot_trees.of_chains(drafted[None], is_looked_up=False)[0]
      nodes = draft_nodes.of_tree(drafted, num_drafted, path, by_model=by_model)
    sources = [source_of(by_model and not x) for x in is_looked_up[1:]]
    self._send(
      num_before,
      ''.join(texts),
      finish_reason,
      pieces=tuple(
        Piece(text=text, source=source)
        for text, source in zip(
          texts[:count], [*sources, Source.TARGET], strict=False
        )
      ),
      num_drafted=num_drafted,
      draft_nodes=nodes,
    )
    return self.token_ids[num_before:]

  def cancel(self) -> None:
    """Ends the output where it is."""
    text = self._stream.finish()
    self._send(len(self.token_ids), text, 'cancelled')

  def _count_round(
    self, verdict: Verdicts, num_drafted: int, news: np.ndarray | None
  ) -> None:
    if news is not None and news[1] != types.NO_OUTCOME:
      _, outcome, num_forwards = news.tolist()
      self._outcomes[outcome] += 1
      self._num_forwards += num_forwards
    self._lengths.append(num_drafted)
    self._num_tree_rounds += verdict.tree is not None and num_drafted > 0
    # Of what the devices found, which may be less than what was verified.
    self._drafted[: min(int(verdict.num_levels), num_drafted)] += 1
    self._accepted[: int(verdict.num_accepted)] += 1

  def _append(self, token_ids: list[int]) -> tuple[list[str], str | None]:
    """Appends tokens up to one that ends the output.

    Returns:
      The text that is certain since each, and why the output has ended.
    """
    if self.matcher is not None:
      token_ids = token_ids[: grammar.advance(self.matcher, token_ids)]
    token_ids, is_ended = self._until_end(token_ids)
    finish_reason = 'stop' if is_ended else None
    is_cut = is_ended and not self.request.sampling.include_stop_str_in_output
    shown = token_ids[:-1] if is_cut else token_ids
    texts = [self._stream.push([token_id]) for token_id in shown]
    texts += [''] * is_cut
    if self._stream.stopped is not None:
      finish_reason, self._stop_reason = 'stop', self._stream.stopped
      token_ids = token_ids[: self._stream.num_tokens - len(self.token_ids)]
    self.token_ids += token_ids
    if self.matcher is not None:
      finish_reason = grammar.finish_reason(self.matcher) or finish_reason
    if finish_reason is None and self.num_known >= self.limit:
      finish_reason = 'length'
    if finish_reason is not None:
      texts[len(token_ids) - 1] += self._stream.finish()
    return texts, finish_reason

  def _until_end(self, token_ids: list[int]) -> tuple[list[int], bool]:
    """Returns new tokens up to one that ends the output; and if one does."""
    sampling = self.request.sampling
    num_early = max(sampling.min_tokens - len(self.token_ids), 0)
    for i, token_id in enumerate(token_ids[num_early:], num_early):
      if token_id in self._eos_token_ids:
        return token_ids[: i + 1], True
      if token_id in sampling.stop_token_ids:
        self._stop_reason = token_id
        return token_ids[: i + 1], True
    return token_ids, False

  def _note_logprobs(self, logprobs: types.Logprobs, count: int) -> None:
    self._logprobs += logprobs.chosen[:count].tolist()
    num_top = self.request.sampling.top_logprobs
    token_ids = logprobs.top_token_ids[:count, :num_top].tolist()
    values = logprobs.top[:count, :num_top].tolist()
    self._top_logprobs += [
      tuple(zip(*pair, strict=True))
      for pair in zip(token_ids, values, strict=True)
    ]

  def _facts_from(self, start: int) -> dict[str, Any]:
    """Returns fields of news and results on the tokens from one on."""
    sampling, stream = self.request.sampling, self._stream
    # An end token that is not shown is not in the stream.
    count = len(self.token_ids)
    offsets = [*stream.offsets[:count], len(stream.text)][:count]
    return {
      'token_ids': tuple(self.token_ids[start:]),
      'text_offsets': tuple(offsets[start:]),
      'logprobs': tuple(self._logprobs[start:]) if sampling.logprobs else None,
      'top_logprobs': tuple(self._top_logprobs[start:])
      if sampling.top_logprobs
      else None,
    }

  def _send(
    self, start: int, text: str, finish_reason: str | None, **news: Any
  ) -> None:
    """Tells the user of the tokens from one on; with a reason, of the end."""
    self.is_finished = finish_reason is not None
    result = self._result(finish_reason) if finish_reason else None
    facts = self._facts_from(start)
    self.handle.push(Update(**facts, text=text, result=result, **news))

  def _result(self, finish_reason: str) -> results.GenerationResult:
    now = time.perf_counter()
    lengths = np.array(self._lengths, np.int64)
    stats = results.GenerationStats(
      prompt_tokens=len(self.request.token_ids),
      new_tokens=len(self.token_ids),
      num_rounds=len(lengths),
      num_drafted=int(lengths.sum()),
      num_accepted=int(self._accepted.sum()),
      drafted_per_position=tuple(self._drafted.tolist()),
      accepted_per_position=tuple(self._accepted.tolist()),
      ttft_seconds=self._first_token_time - self._start_time,
      decode_seconds=now
      - self._first_token_time
      - profiling.compile_seconds(self._first_token_time),
      # A stop may have cut the first ones.
      decoded_tokens=max(len(self.token_ids) - self._num_first, 0),
      latency_seconds=now - self._start_time,
      num_hits=int(self._outcomes[tree_lib.HIT]),
      num_late_hits=int(self._outcomes[tree_lib.LATE_HIT]),
      num_misses=int(self._outcomes[tree_lib.MISS]),
      num_draft_forwards=self._num_forwards,
      num_plain_rounds=int((lengths == 0).sum()),
      num_tree_rounds=self._num_tree_rounds,
      chosen_lengths=tuple(
        np.bincount(lengths, minlength=len(self._drafted) + 1).tolist()
      ),
    )
    facts, text = self._facts_from(0), self._stream.text
    facts['text_offsets'] = tuple(
      min(offset, len(text)) for offset in facts['text_offsets']
    )
    return results.GenerationResult(
      text=text,
      finish_reason=finish_reason,
      stop_reason=self._stop_reason,
      stats=stats,
      **facts,
    )
