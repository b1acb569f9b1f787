"""What a finished request gives: text, tokens, and raw counts."""

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationStats:
  """Raw counts and times of one request; ratios are derived.

  Attributes:
    prompt_tokens: tokens of the prompt, template included.
    new_tokens: tokens of the output.
    num_rounds: target forwards that verified or decoded for this request, after
      those that read its prompt.
    num_drafted: draft tokens that were verified.
    num_accepted: draft tokens that were accepted.
    drafted_per_position: number of rounds that drafted position i of the chain.
    accepted_per_position: number of these rounds that accepted it (and so all
      before).
    num_hits: rounds of a tree after which the last verified token was in it
      and expanded.
    num_late_hits: rounds after which it was in the tree, not yet expanded.
    num_misses: rounds after which it was not in the tree.
    num_draft_forwards: forwards of a tree's draft between a verdict and the
      next proposal, for which the target waited.
    num_plain_rounds: rounds that verified no draft token.
    num_tree_rounds: rounds that verified a tree; the others, a chain.
    chosen_lengths: number of rounds that verified i draft tokens; those of a
      tree are its nodes without the root.
    ttft_seconds: time from submission to the first token on the host.
    decode_seconds: time from the first token on the host to the last, without
      what was compiled meanwhile.
    decoded_tokens: new tokens of these seconds: all but those that came first.
    latency_seconds: time from submission to the last token on the host.
  """

  prompt_tokens: int
  new_tokens: int = 0
  num_rounds: int = 0
  num_drafted: int = 0
  num_accepted: int = 0
  drafted_per_position: tuple[int, ...] = ()
  accepted_per_position: tuple[int, ...] = ()
  ttft_seconds: float = 0.0
  decode_seconds: float = 0.0
  decoded_tokens: int = 0
  latency_seconds: float = 0.0
  num_hits: int = 0
  num_late_hits: int = 0
  num_misses: int = 0
  num_draft_forwards: int = 0
  num_plain_rounds: int = 0
  num_tree_rounds: int = 0
  chosen_lengths: tuple[int, ...] = ()

  @property
  def tpot_seconds(self) -> float | None:
    """Mean seconds of a token after the first; None if there is none."""
    if self.new_tokens < 2:
      return None
    return (self.latency_seconds - self.ttft_seconds) / (self.new_tokens - 1)

  @property
  def acceptance_length(self) -> float:
    """Mean tokens a round, the recovered or bonus token included."""
    return 1 + self.num_accepted / max(self.num_rounds, 1)

  @property
  def acceptance_rate(self) -> float:
    """Share of the drafted tokens that was accepted."""
    return self.num_accepted / max(self.num_drafted, 1)

  @property
  def acceptance_rate_per_position(self) -> tuple[float, ...]:
    """Share of accepting rounds among those that drafted position i."""
    return tuple(
      accepted / max(drafted, 1)
      for accepted, drafted in zip(
        self.accepted_per_position, self.drafted_per_position, strict=True
      )
    )

  @property
  def hit_rate(self) -> float:
    """Share of hits among the verdicts on a tree."""
    return self.num_hits / self._num_verdicts

  @property
  def late_hit_rate(self) -> float:
    """Share of late hits among the verdicts on a tree."""
    return self.num_late_hits / self._num_verdicts

  @property
  def miss_rate(self) -> float:
    """Share of misses among the verdicts on a tree."""
    return self.num_misses / self._num_verdicts

  @property
  def _num_verdicts(self) -> int:
    return max(self.num_hits + self.num_late_hits + self.num_misses, 1)

  @property
  def tokens_per_second(self) -> float | None:
    """Tokens per second of decoding, without the prompt and compilation.

    None if all tokens came at once.
    """
    if not self.decoded_tokens:
      return None
    return self.decoded_tokens / self.decode_seconds


# Token ids with their log-probabilities, the most probable first.
TopLogprobs = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
  """One finished request.

  Attributes:
    text: text of the output; what ends it, and what follows that, are cut off
      unless the request wants to see it.
    token_ids: tokens of the output, the one that ends it or those of the stop
      string included.
    finish_reason: 'stop' (end token, stop string, or end of what a grammar
      allows), 'length' (token limit or context limit), 'cancelled' (by the user
      of an engine), or 'error' (the grammar has become too complex).
    stop_reason: stop string, or token of `SamplingParams.stop_token_ids`, that
      ended the output; None if an end token of the model or something else did.
    text_offsets: number of characters of the text before each token. Tokens
      of one character have the same, and those without text that of its end.
    logprobs: log-probability of each token under the model's own distribution,
      if asked for.
    top_logprobs: most probable tokens at each position with their
      log-probabilities, if asked for.
    stats: raw counts and times.
  """

  text: str
  token_ids: tuple[int, ...]
  finish_reason: str
  stop_reason: int | str | None = None
  text_offsets: tuple[int, ...] = ()
  logprobs: tuple[float, ...] | None = None
  top_logprobs: tuple[TopLogprobs, ...] | None = None
  stats: GenerationStats


def total_acceptance_length(stats: Sequence[GenerationStats]) -> float:
  """Acceptance length over many requests: sums first, the ratio last."""
  num_rounds = sum(s.num_rounds for s in stats)
  return 1 + sum(s.num_accepted for s in stats) / max(num_rounds, 1)


def sums(counts: Sequence[Sequence[int]]) -> list[int]:
  """Returns the sum at each place; places that a sequence lacks count 0."""
  return [sum(x) for x in itertools.zip_longest(*counts, fillvalue=0)]


def rate_per_position(stats: Sequence[GenerationStats]) -> list[float | None]:
  """Accepted at each position, of the drafts that had it; None without any."""
  drafted = sums([s.drafted_per_position for s in stats])
  accepted = sums([s.accepted_per_position for s in stats])
  return [a / d if d else None for a, d in zip(accepted, drafted, strict=True)]


def tree_rates(stats: Sequence[GenerationStats]) -> dict[str, float | None]:
  """Rates of hits, late hits and misses of verdicts; None without trees."""
  return verdict_rates(
    sum(s.num_hits for s in stats),
    sum(s.num_late_hits for s in stats),
    sum(s.num_misses for s in stats),
  )


def verdict_rates(
  num_hits: int, num_late_hits: int, num_misses: int
) -> dict[str, float | None]:
  """Returns the shares of the kinds of verdicts; None without any."""
  counts = {
    'hit_rate': num_hits,
    'late_hit_rate': num_late_hits,
    'miss_rate': num_misses,
  }
  total = sum(counts.values())
  return {
    name: count / total if total else None for name, count in counts.items()
  }
