"""What rounds of a token tree take, priced with the times of forwards.

What a round accepts and how often the draft runs does not depend on how fast
the chips are, as target and draft meet once a round (SwiftSpec, algorithm 1).
So rounds that were run once, anywhere, have a price on any chips.

Legend: R requests, or single rounds.
"""

import dataclasses

import numpy as np

_SLOW = 0.05  # of the requests
_NUM_DRAWS = 1000
_QUANTILES = 0.025, 0.975


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """Seconds of the parts of a round.

  Attributes:
    target: seconds of a verification.
    draft: seconds of an expansion of the tree: a forward of the draft.
    handoff: seconds between a verdict and the next verification without draft
      forwards: both transfers, re-rooting and selection.
  """

  target: float
  draft: float
  handoff: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
  """Recorded rounds, summed up for each request.

  Attributes:
    num_tokens: i[R] tokens of the output.
    num_rounds: i[R] rounds.
    num_waits: i[R] draft forwards that the target waited for.
    num_growth_steps: draft forwards beside a verification; 0 in serial mode.
  """

  num_tokens: np.ndarray
  num_rounds: np.ndarray
  num_waits: np.ndarray
  num_growth_steps: int

  @property
  def acceptance_length(self) -> float:
    """Mean tokens of a round, the bonus token included."""
    return float(self.num_tokens.sum() / self.num_rounds.sum())

  def seconds(self, times: Times) -> np.ndarray:
    """Returns f[R] the seconds of each request on given chips."""
    step = max(times.target, self.num_growth_steps * times.draft)
    waits = self.num_waits * times.draft
    return self.num_rounds * (step + times.handoff) + waits

  def tokens_per_second(self, times: Times) -> float:
    """Returns all tokens over all seconds."""
    return float(self.num_tokens.sum() / self.seconds(times).sum())

  def slow_tokens_per_second(self, times: Times) -> float:
    """Returns the speed that 95 % of the requests reach."""
    return float(np.quantile(self.num_tokens / self.seconds(times), _SLOW))


def interval(
  rounds: Rounds,
  times: Times,
  target_ratios: np.ndarray,
  draft_ratios: np.ndarray,
) -> tuple[float, float]:
  """Returns an interval of tokens per second, of 95 %.

  Each draw takes other requests (the bootstrap) and errs in the times of both
  forwards as other predictions did. The seed of the draws is fixed.

  Args:
    rounds: recorded rounds.
    times: predicted seconds.
    target_ratios: f[N] published over predicted seconds of large models.
    draft_ratios: f[M] the same of small models.
  """
  rng = np.random.default_rng(0)
  rates = []
  for _ in range(_NUM_DRAWS):
    chosen = rng.integers(len(rounds.num_tokens), size=len(rounds.num_tokens))
    erring = dataclasses.replace(
      times,
      target=times.target * rng.choice(target_ratios),
      draft=times.draft * rng.choice(draft_ratios),
    )
    seconds = rounds.seconds(erring)[chosen].sum()
    rates.append(rounds.num_tokens[chosen].sum() / seconds)
  low, high = np.quantile(rates, _QUANTILES)
  return float(low), float(high)
