"""Suffix lookup: what followed the last tokens most often, here or before.

The end of a text is looked for in the text itself and in those of requests that
have ended. Each token of a draft is the one that followed the longest match
most often (SSSD, arXiv 2411.05894; SuffixDecoding, arXiv 2411.04975). It runs
on the host, where an engine knows all tokens.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from swiftspec_jax import errors, policies
from swiftspec_jax.drafters.engine_drafter import (
  HostDrafter,
  SlotTexts,
  chains_of,
)
from swiftspec_jax.drafters.spec import DraftSpec, Setup
from swiftspec_jax.step.slot_drafts import SlotDrafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixLookup(DraftSpec):
  """Drafter of an engine.

  Attributes:
    min_match: fewest tokens that count as a match.
    max_match: most tokens that are compared.
    min_confidence: a draft ends where the product of the shares of its tokens
      among all followers is less.
    num_past_tokens: tokens of the latest ended requests that are kept; each
      takes about 300 bytes for each size of a match.
  """

  min_match: int = 2
  max_match: int = 5
  min_confidence: float = 0.2
  num_past_tokens: int = 32_768

  def __post_init__(self):
    checks = {
      'min_match': (1 <= self.min_match <= self.max_match, '1 to max_match'),
      'min_confidence': (0 <= self.min_confidence < 1, 'in [0, 1)'),
      'num_past_tokens': (self.num_past_tokens >= 0, 'at least 0'),
    }
    errors.check_fields(self, checks)

  def make(self, setup: Setup) -> 'SuffixDrafter':
    return SuffixDrafter(self)


class Followers:
  """How often which tokens followed each n-gram of some texts."""

  def __init__(self, smallest: int, largest: int):
    self._sizes = range(smallest, largest + 1)
    self._counts: dict[tuple[int, ...], dict[int, int]] = {}

  def add(self, token_ids: Sequence[int], start: int = 0) -> None:
    """Counts the tokens of a text from place `start` on."""
    for key, token_id in self._ngrams(token_ids, start):
      counts = self._counts.setdefault(key, {})
      counts[token_id] = counts.get(token_id, 0) + 1

  def remove(self, token_ids: Sequence[int]) -> None:
    """Takes a text that was added out again."""
    for key, token_id in self._ngrams(token_ids, 0):
      counts = self._counts[key]
      counts[token_id] -= 1
      if not counts[token_id]:
        del counts[token_id]
      if not counts:
        del self._counts[key]

  def _ngrams(
    self, token_ids: Sequence[int], start: int
  ) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields n-grams with the token after them, from place `start` on."""
    for end in range(start, len(token_ids)):
      for size in self._sizes:
        if size <= end:
          yield tuple(token_ids[end - size : end]), token_ids[end]

  def after(self, key: tuple[int, ...]) -> dict[int, int]:
    """Returns how often each token followed."""
    return self._counts.get(key, {})


@dataclasses.dataclass(frozen=True, eq=False)
class _Text:
  token_ids: list[int]
  followers: Followers


class SuffixDrafter(HostDrafter):
  """Suffix lookup for the rows of an engine.

  It reads a text when a draft is wanted, so steps without drafts cost
  nothing; of an ended request it keeps what it has read.
  """

  def __init__(self, lookup: SuffixLookup):
    self._lookup = lookup
    self._texts = collections.defaultdict[int, _Text](
      lambda: _Text([], self._new_followers())
    )
    self.reset()

  @property
  def name(self) -> str:
    lookup = self._lookup
    return f'suffix_lookup_{lookup.min_match}_{lookup.max_match}'

  def draft(
    self, view: policies.StepView, lengths: np.ndarray, texts: SlotTexts
  ) -> SlotDrafts:
    confidences = np.zeros((view.buckets.max_length, view.num_rows))
    chains = {}
    for row in np.flatnonzero(lengths).tolist():
      text = self._texts[int(view.request_ids[row])]
      start = len(text.token_ids)
      text.token_ids.extend(texts.known_from(view, row, start))
      text.followers.add(text.token_ids, start)
      found = self._continuation(text, int(lengths[row]))
      chains[row] = [token_id for token_id, _ in found]
      confidences[: len(found), row] = [share for _, share in found]
    return chains_of(view, texts, chains, confidences)

  def forget(self, request_id: int) -> None:
    text = self._texts.pop(request_id, None)
    if text is None:
      return
    self._past.append(text.token_ids)
    self._num_past += len(text.token_ids)
    self._followers.add(text.token_ids)
    while self._num_past > self._lookup.num_past_tokens:
      oldest = self._past.popleft()
      self._num_past -= len(oldest)
      self._followers.remove(oldest)

  def reset(self) -> None:
    self._past: collections.deque[list[int]] = collections.deque()
    self._num_past = 0
    self._followers = self._new_followers()

  def _new_followers(self) -> Followers:
    return Followers(self._lookup.min_match, self._lookup.max_match)

  def _continuation(self, text: _Text, most: int) -> list[tuple[int, float]]:
    """Returns up to `most` tokens with their shares among all followers."""
    end = text.token_ids[-self._lookup.max_match :]
    found, product = [], 1.0
    while len(found) < most:
      counts = self._counts(text, end)
      if not counts:
        break
      # Of tokens that followed equally often, the lowest id.
      token_id = min(counts, key=lambda i: (-counts[i], i))
      # One more, as what happened once need not happen again.
      share = counts[token_id] / (sum(counts.values()) + 1)
      product *= share
      if product < self._lookup.min_confidence:
        break
      found.append((token_id, share))
      end = [*end[-self._lookup.max_match + 1 :], token_id]
    return found

  def _counts(self, text: _Text, end: list[int]) -> dict[int, int]:
    """Returns what followed the longest match of a text's end."""
    for size in range(len(end), self._lookup.min_match - 1, -1):
      key = tuple(end[-size:])
      own, past = text.followers.after(key), self._followers.after(key)
      if own or past:
        return {i: own.get(i, 0) + past.get(i, 0) for i in {*own, *past}}
    return {}
