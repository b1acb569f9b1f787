"""How often a draft guesses the target's greedy token, on held-out samples."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from swiftspec_jax.distillation import packing
from swiftspec_jax.distillation.samples import Role, Sample

CHAIN = 4  # draft tokens in a round


@dataclasses.dataclass(kw_only=True)
class _Sums:
  num_tokens: int = 0
  agreement: float = 0.0
  acceptance: float = 0.0
  kl: float = 0.0
  chain_tokens: int = 0
  chain_rounds: int = 0

  def figures(self) -> dict[str, float]:
    tokens = max(self.num_tokens, 1)
    return {
      'num_tokens': self.num_tokens,
      'agreement': self.agreement / tokens,
      'acceptance': self.acceptance / tokens,
      'kl': self.kl / tokens,
      'chain_acceptance_length': self.chain_tokens / max(self.chain_rounds, 1),
    }


def summarize(
  batches: Iterable[tuple[list[list[packing.Piece]], dict[str, np.ndarray]]],
) -> dict[str, dict[str, float]]:
  """Returns the figures of each kind, and of 'all'.

  `agreement` is the share of answer tokens at which the draft's best token is
  the target's, `acceptance` the mean probability that sampling accepts, `kl`
  the mean divergence. `chain_acceptance_length` is the tokens of a round with
  a chain of 4, bonus token included, in the target's greedy answers: exact,
  as all that counts stands before the first token that is not accepted. Of a
  draft that reads features, the k-th token of a chain is that of pass k, so
  this is exact, too; the other figures are those of the first token.

  Args:
    batches: pieces of each row, and the measures [B, S] of each token.
  """
  sums: dict[str, _Sums] = collections.defaultdict(_Sums)
  for rows, measures in batches:
    for i, row in enumerate(rows):
      for _, place, part, branch in packing.walk(row):
        if branch:
          values = {name: x[i, place] for name, x in measures.items()}
          for kind in (part.kind, 'all'):
            _add(sums[kind], part, values)
  return {kind: sums[kind].figures() for kind in sorted(sums)}


def _add(sums: _Sums, sample: Sample, values: dict[str, np.ndarray]) -> None:
  # The token after is an answer's.
  places = np.flatnonzero(sample.roles[1:] == Role.ANSWER)
  sums.num_tokens += len(places)
  sums.agreement += float(values['agreement'][places].sum())
  sums.acceptance += float(values['acceptance'][places].sum())
  sums.kl += float(values['kl'][places].sum())
  if (sample.top_token_ids[places, 0] == sample.token_ids[places + 1]).all():
    first = values['agreement']
    hits = [
      values.get(f'agreement_{number}', first)[places] > 0
      for number in range(1, CHAIN + 1)
    ]
    sums.chain_tokens += len(places)
    sums.chain_rounds += count_rounds(hits)


def count_rounds(hits: Sequence[Sequence[bool]]) -> int:
  """Returns the rounds in which a chain of 4 writes a text.

  Args:
    hits: flags by token of a chain and by token of the text: whether the draft
      would guess it.
  """
  rounds = place = 0
  size = len(hits[0])
  while place < size:
    accepted = 0
    while (
      accepted < CHAIN
      and place + accepted < size
      and hits[accepted][place + accepted]
    ):
      accepted += 1
    place += accepted + 1
    rounds += 1
  return rounds
