"""The figures of asynchronous trees in batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftspec_jax.engine.rows import RoundRecord
from swiftspec_jax.planning.rounds import Rounds, Times

# Names of what is compared: the mode, and whether rows wait.
VARIANTS = {
  'serial': ('serial', True),
  'async, all wait': ('async', True),
  'async, root alone': ('async', False),
}


def summarize(
  records: Sequence[RoundRecord],
  seconds: float,
  *,
  target_seconds: float,
  draft_seconds: float,
  num_growth_steps: int,
) -> dict[str, Any]:
  """Returns the figures of a run.

  Args:
    records: records of the rounds.
    seconds: duration of the run, prefill included.
    target_seconds: a step of the target.
    draft_seconds: a forward of the draft.
    num_growth_steps: draft forwards beside a step of the target; 0 in serial
      mode.

  Returns:
    `tokens_per_second`, `tpot` (seconds per output token of a row),
    `measured_tokens_per_second`, `acceptance_length` of a row and round,
    `hit_rate`, and `forwards_waited`, draft forwards a round that the target
    waited for. The first two are for devices with the given step times.
  """
  num_rows = np.array([len(record.lengths) for record in records])
  num_tokens = np.array(
    [len(record.lengths) + record.num_accepted.sum() for record in records]
  )
  forwards = np.array([record.num_forwards for record in records])
  outcomes = sum(record.outcomes for record in records)
  times = Rounds(
    num_tokens=num_tokens,
    num_rounds=num_rows > 0,
    num_waits=forwards * (num_rows > 0),
    num_growth_steps=num_growth_steps,
  ).seconds(Times(target=target_seconds, draft=draft_seconds))
  total = int(num_tokens.sum())
  return {
    'tokens_per_second': float(total / times.sum()),
    'tpot': float((times * num_rows).sum() / total),
    'measured_tokens_per_second': total / seconds,
    'acceptance_length': float(total / num_rows.sum()),
    'hit_rate': float(outcomes[-1] / max(outcomes.sum(), 1)),
    'forwards_waited': float(forwards[num_rows > 0].mean()),
    'num_rounds': int((num_rows > 0).sum()),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the figures as text."""
  lines = [
    f'{"rows":>4}  {"variant":<18}{"tokens/s":>9}{"tpot ms":>9}'
    f'{"measured":>10}{"tokens":>8}{"hits":>7}{"waited":>8}'
  ]
  lines += [
    f'{row["batch_size"]:>4}  {row["variant"]:<18}'
    f'{row["tokens_per_second"]:>9.0f}{1e3 * row["tpot"]:>9.2f}'
    f'{row["measured_tokens_per_second"]:>10.1f}'
    f'{row["acceptance_length"]:>8.2f}{row["hit_rate"]:>7.2f}'
    f'{row["forwards_waited"]:>8.2f}'
    for row in rows
  ]
  return '\n'.join(lines)
