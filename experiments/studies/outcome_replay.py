"""Outcomes of a verification that a draft has prepared for, chain by chain.

Speculative speculative decoding (SSD, arXiv 2603.03251): while the target
verifies a chain of K tokens, the draft guesses how that will end. An outcome is
how many tokens are accepted and which token the target writes after them. For
some outcomes it drafts the next chain. If the verdict is one of them, that
chain is there at once.

Legend: N tokens of a text, K tokens of a chain.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

# Accepted tokens, and the rank of the token after them in the draft's
# distribution.
Outcome = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """Rounds of chains over texts.

  Attributes:
    num_tokens: number of tokens that were written.
    num_rounds: number of rounds.
    num_hits: rounds whose outcome was prepared.
  """

  num_tokens: int
  num_rounds: int
  num_hits: int

  @property
  def hit_rate(self) -> float:
    """Share of rounds."""
    return self.num_hits / self.num_rounds

  @property
  def acceptance_length(self) -> float:
    """Mean tokens of a round, the bonus token included."""
    return self.num_tokens / self.num_rounds

  def seconds(self, target: float, draft: float, length: int) -> float:
    """Returns the seconds of all rounds.

    Args:
      target: seconds of a verification.
      draft: seconds of a draft forward.
      length: K, draft forwards beside each verification, and after a miss.
    """
    num_misses = self.num_rounds - self.num_hits
    step = max(target, length * draft)
    return self.num_rounds * step + num_misses * length * draft


def most_probable(
  acceptance: float, length: int, count: int
) -> frozenset[Outcome]:
  """Returns the outcomes that are best prepared for.

  The true token has rank r in the draft's distribution with probability a (1 -
  a)^r, as in `drafting.forced_acceptance`. After an accepted part of a chain
  its next token, of rank 0, is known to be wrong.

  Args:
    acceptance: a in (0, 1).
    length: K.
    count: number of outcomes.
  """
  outcomes = [
    (accepted, rank)
    for accepted in range(length + 1)
    for rank in range(accepted < length, count + 1)
  ]
  return frozenset(
    sorted(
      outcomes,
      key=lambda o: (-(acceptance ** (o[0] + 1)) * (1 - acceptance) ** o[1], o),
    )[:count]
  )


def replay(
  texts: Sequence[np.ndarray], length: int, prepared: frozenset[Outcome]
) -> Replay:
  """Returns what happens to chains over texts.

  Args:
    texts: rank i64[N] of each token of a text in the draft's distribution.
    length: K.
    prepared: outcomes that are prepared for in each round.
  """
  num_rounds = num_hits = 0
  for ranks in texts:
    place = 0
    while place < len(ranks):
      wrong = np.flatnonzero(ranks[place : place + length])
      accepted = int(wrong[0]) if len(wrong) else length
      place += accepted
      num_rounds += 1
      # After the end of a text nothing is wanted.
      num_hits += place >= len(ranks) or (accepted, ranks[place]) in prepared
      place += 1
  return Replay(
    num_tokens=sum(map(len, texts)), num_rounds=num_rounds, num_hits=num_hits
  )
