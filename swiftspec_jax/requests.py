"""What the host knows of requests: from the prompt to the result."""

import dataclasses
import enum
import math
import time

import numpy as np

from swiftspec_jax import errors, grammar, images, profiling, results, types
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax import tree as tree_lib
from swiftspec_jax.config import SamplingParams
from swiftspec_jax.images import Image
from swiftspec_jax.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt, as token ids, and how to continue it.

  Attributes:
    token_ids: tokens of the prompt.
    sampling: parameters by which its tokens are chosen.
    reference_token_ids: the output, where `TreeConfig.forced_acceptance` lets
      the draft know it; else not used.
    slo_tpot: promised seconds per output token after the first one, for
      policies that mind promises; None for no promise.
    images: images of the prompt, in their order, for a model that reads some.
      `images.expand` makes room for them among the tokens.
  """

  token_ids: tuple[int, ...]
  sampling: SamplingParams = SamplingParams()
  reference_token_ids: tuple[int, ...] = ()
  slo_tpot: float | None = None
  images: tuple[Image, ...] = ()

  def __post_init__(self):
    slo = self.slo_tpot
    is_valid = slo is None or 0 < slo < math.inf
    requirement = 'finite seconds above 0, or None for no promise'
    errors.check_fields(self, {'slo_tpot': (is_valid, requirement)})


def check(
  request: Request,
  target: Model,
  max_context: int,
  who: str,
  max_images: int = 0,
) -> None:
  """Raises UserError for a request that cannot be decoded.

  Args:
    request: request to look at.
    target: model that the tokens are for.
    max_context: most tokens, prompt and output together.
    who: name of what has that limit, for the message.
    max_images: most images.
  """
  length, vocab_size = len(request.token_ids), target.config.vocab_size
  if length == 0:
    raise errors.UserError('the prompt is empty; give at least one token')
  if length >= max_context:
    raise errors.UserError(
      f'the prompt has {length} tokens; {who} takes at most {max_context} '
      'tokens, prompt and output together'
    )
  for token_id in (min(request.token_ids), max(request.token_ids)):
    if not 0 <= token_id < vocab_size:
      raise errors.UserError(
        f'the prompt has token {token_id}; ids are 0 to {vocab_size - 1}'
      )
  request.sampling.check_vocabulary(vocab_size)
  if request.sampling.structured_outputs is not None:
    grammar.start(request.sampling.structured_outputs, target)
  vision = target.config.vision
  if request.images and vision is None:
    raise errors.UserError(
      f'{target.name} reads no images; leave them out, or take a LLaVA'
    )
  if len(request.images) > max_images:
    raise errors.UserError(
      f'the prompt has {len(request.images)} images; {who} takes at most '
      f'{max_images}; a decoder takes any number, an engine the max_images of '
      'its sizes'
    )
  if vision is not None:
    images.check_places(request.token_ids, request.images, vision)


def limit_of(
  request: Request, target: Model, max_context: int, max_images: int = 0
) -> int:
  """Returns the length, prompt and output, at which a request must end.

  Raises:
    UserError: it cannot be decoded.
  """
  check(request, target, max_context, target.name, max_images)
  max_new_tokens = request.sampling.max_new_tokens or max_context
  return min(len(request.token_ids) + max_new_tokens, max_context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """News of one request.

  Attributes:
    index: number of the request in the list that was given.
    text: text that is certain now and was not in an earlier event.
    result: the whole answer, in the last event of the request; None before.
  """

  index: int
  text: str
  result: results.GenerationResult | None = None


class Source(enum.StrEnum):
  """Who proposed a token of an output; the target has approved all of them."""

  TARGET = 'target'  # nobody: it is the target's own
  DRAFT = 'draft'  # a draft model
  # A text; or a grammar, but for tokens among those of a model's chain. In
  # trees of both, before the model did.
  LOOKUP = 'lookup'


def source_of(by_model: bool) -> Source:
  """Returns who proposed a draft token."""
  return Source.DRAFT if by_model else Source.LOOKUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftNode:
  """A draft token that the target has verified.

  Attributes:
    token_id: token.
    parent: index of the node before it among those of its step, -1 after the
      last known token.
    source: who proposed it.
    prob: probability that the drafter gives to it and all nodes above it, None
      where it gives none.
    is_accepted: whether the target has chosen it, and all nodes above it.
  """

  token_id: int
  parent: int
  source: Source
  prob: float | None
  is_accepted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A token of an output, as people see it."""

  text: str  # that is certain since this token; it can be empty
  source: Source


class Row:
  """What the host knows of one request that is being decoded."""

  def __init__(
    self,
    request: Request,
    limit: int,
    target: Model,
    num_speculative_tokens: int,
    *,
    chains_by_model: bool,
  ):
    """Nothing has been decoded yet.

    Args:
      request: prompt, and how to continue it.
      limit: tokens, prompt and output together, at which it must end.
      target: model that the tokens are for.
      num_speculative_tokens: K of the drafter.
      chains_by_model: whether a model drafts what is no tree.
    """
    self.request = request
    self.limit = limit
    self.is_finished = False
    wanted = request.sampling.structured_outputs
    # Where in its grammar the output is, if there is one.
    self.matcher = None if wanted is None else grammar.start(wanted, target)
    self._chains_by_model = chains_by_model
    sampling = request.sampling
    self._eos_token_ids = (
      () if sampling.ignore_eos else target.config.eos_token_ids
    )
    self._stream = tokenizer_lib.TextStream(
      target.tokenizer,
      sampling.stop,
      min_tokens=sampling.min_tokens,
      include_stop=sampling.include_stop_str_in_output,
      skip_special_tokens=sampling.skip_special_tokens,
      follows=request.token_ids,
    )
    self._stop_token_ids = frozenset(sampling.stop_token_ids)
    self._stop_reason: int | str | None = None
    self._token_ids: list[int] = []
    self._pieces: list[Piece] = []
    self._logprobs: list[float] = []
    self._top_logprobs: list[results.TopLogprobs] = []
    self._lengths: list[int] = []  # draft tokens of each round
    self._num_tree_rounds = 0
    self._num_forwards = 0
    self._outcomes = np.zeros(tree_lib.NUM_OUTCOMES, int)
    self._drafted = np.zeros(num_speculative_tokens, int)
    self._accepted = np.zeros(num_speculative_tokens, int)
    self._start_time = self._first_token_time = math.nan
    self._num_first = 0  # tokens of the first step

  @property
  def token_ids(self) -> list[int]:
    """The output so far; do not change it."""
    return self._token_ids

  def pieces_from(self, start: int) -> tuple[Piece, ...]:
    """Returns those of the tokens from one on."""
    return tuple(self._pieces[start:])

  def text_offsets_from(self, start: int) -> tuple[int, ...]:
    """Returns those of the tokens from one on."""
    stream, count = self._stream, len(self._token_ids)
    # An end token that is not shown is not in the stream.
    offsets = [*stream.offsets[:count], len(stream.text)][:count]
    return tuple(offsets[start:])

  def logprobs_from(self, start: int) -> tuple[float, ...] | None:
    """Returns those of the tokens from one on, if the request wants them."""
    if not self.request.sampling.logprobs:
      return None
    return tuple(self._logprobs[start:])

  def top_logprobs_from(
    self, start: int
  ) -> tuple[results.TopLogprobs, ...] | None:
    """Returns those of the tokens from one on, if the request wants them."""
    if not self.request.sampling.top_logprobs:
      return None
    return tuple(self._top_logprobs[start:])

  def start(self) -> None:
    """Starts the clock of the first token."""
    self._start_time = time.perf_counter()

  def decode_seconds(self, now: float) -> float:
    """Returns the seconds from the first output token to `now`, or 0."""
    return now - self._first_token_time if self._token_ids else 0.0

  def push(
    self, report: types.StepReport, logprobs: types.Logprobs | None
  ) -> tuple[str, results.GenerationResult | None]:
    """Takes one step's output; returns the news.

    Args:
      report: outcome of the step for this row.
      logprobs: log-probabilities of this row on the host, without the
        leading axis.

    Returns:
      Text that is certain now, and the result if the output has ended.
    """
    is_tree = report.is_tree and report.num_drafted > 0
    if self._token_ids or report.num_drafted:  # else a prompt has been read
      self._count_round(report, is_tree)
    if not self._token_ids:
      self._first_token_time = time.perf_counter()
      self._num_first = len(report.token_ids)
    token_ids = report.token_ids
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
      token_ids = token_ids[: self._stream.num_tokens - len(self._token_ids)]
    self._token_ids += token_ids
    if logprobs is not None:
      self._note_logprobs(logprobs, len(token_ids))
    if self.matcher is not None:
      finish_reason = grammar.finish_reason(self.matcher) or finish_reason
    num_known = len(self.request.token_ids) + len(self._token_ids)
    if finish_reason is None and num_known >= self.limit:
      finish_reason = 'length'
    if finish_reason is not None:
      texts[len(token_ids) - 1] += self._stream.finish()
    own, sources = texts[: len(token_ids)], self._sources(report, is_tree)
    self._pieces += [
      Piece(text=text, source=source)
      for text, source in zip(own, sources, strict=False)
    ]
    text = ''.join(texts)
    if finish_reason is None:
      return text, None
    self.is_finished = True
    return text, self._result(finish_reason)

  def _count_round(self, report: types.StepReport, is_tree: bool) -> None:
    if report.outcome != types.NO_OUTCOME:
      self._outcomes[report.outcome] += 1
    self._lengths.append(report.num_drafted)
    self._num_tree_rounds += is_tree
    self._num_forwards += report.num_forwards
    self._drafted[: report.num_levels] += 1
    self._accepted[: report.num_accepted] += 1

  def _until_end(self, token_ids: list[int]) -> tuple[list[int], bool]:
    """Returns new tokens up to one that ends the output; and if one does."""
    num_early = max(self.request.sampling.min_tokens - len(self._token_ids), 0)
    for i, token_id in enumerate(token_ids[num_early:], num_early):
      if token_id in self._eos_token_ids:
        return token_ids[: i + 1], True
      if token_id in self._stop_token_ids:
        self._stop_reason = token_id
        return token_ids[: i + 1], True
    return token_ids, False

  def _sources(self, report: types.StepReport, is_tree: bool) -> list[Source]:
    """Returns who proposed each token of a step, the target's own last."""
    by_model = is_tree or self._chains_by_model
    return [
      *(source_of(by_model and not x) for x in report.is_looked_up),
      Source.TARGET,
    ]

  def _note_logprobs(self, logprobs: types.Logprobs, count: int) -> None:
    self._logprobs += logprobs.chosen[:count].tolist()
    num_top = self.request.sampling.top_logprobs
    token_ids = logprobs.top_token_ids[:count, :num_top].tolist()
    values = logprobs.top[:count, :num_top].tolist()
    self._top_logprobs += [
      tuple(zip(*pair, strict=True))
      for pair in zip(token_ids, values, strict=True)
    ]

  def cancel(self) -> tuple[str, results.GenerationResult]:
    """Ends the output where it is; returns the news."""
    self.is_finished = True
    text = self._stream.finish()
    return text, self._result('cancelled')

  def _result(self, finish_reason: str) -> results.GenerationResult:
    now = time.perf_counter()
    lengths = np.array(self._lengths, np.int64)
    stats = results.GenerationStats(
      prompt_tokens=len(self.request.token_ids),
      new_tokens=len(self._token_ids),
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
      decoded_tokens=max(len(self._token_ids) - self._num_first, 0),
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
    return results.GenerationResult(
      text=self._stream.text,
      token_ids=tuple(self._token_ids),
      finish_reason=finish_reason,
      stop_reason=self._stop_reason,
      text_offsets=tuple(
        min(offset, len(self._stream.text))
        for offset in self.text_offsets_from(0)
      ),
      logprobs=self.logprobs_from(0),
      top_logprobs=self.top_logprobs_from(0),
      stats=stats,
    )
