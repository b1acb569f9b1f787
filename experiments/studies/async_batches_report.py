"""The figures of asynchronous trees in batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from configs.deployment import Deployment
from experiments.measuring import benchmark_report
from experiments.planning import plan_search
from swiftspec_jax.config import TreeConfig
from swiftspec_jax.engine.engine import StepRecord
from swiftspec_jax.planning.rounds import Rounds, Times

# Names of what is compared: the mode, and whether rows wait; None is chosen.
VARIANTS = {
  'serial': ('serial', True),
  'async, all wait': ('async', True),
  'async, root alone': ('async', False),
  'async, chosen': ('async', None),
}


def best_of_splits(
  deployment: Deployment,
  mode: str,
  run: Callable[[Times], Sequence[StepRecord]],
  tree: TreeConfig,
  num_rows: int,
) -> dict[str, Any]:
  """Returns the figures of rounds on the chips of a deployment, split best.

  The draft is its first one, and both models have the first of its dtypes. The
  programs start the kernels that were counted.

  Args:
    deployment: models and chips.
    mode: 'serial' or 'async'.
    run: function that returns the records of rounds for chips with the given
      times.
    tree: sizes of the trees.
    num_rows: rows that decode together.

  Returns:
    As `summarize`, and `target_chips`.
  """
  weight_dtype = deployment.weight_dtypes[0]
  growth = tree.num_draft_steps if mode == 'async' else 0
  found = []
  for target_chips, draft_chips in plan_search.splits(deployment, mode):
    choice = plan_search.Choice(
      mode=mode,
      target_chips=target_chips,
      draft_chips=draft_chips,
      kernels=True,
      weight_dtype=weight_dtype,
      draft=deployment.drafts[0],
      draft_weight_dtype=weight_dtype,
    )
    times = plan_search.price_of(
      deployment, choice, tree, num_rows=num_rows
    ).times
    figures = summarize(run(times), times, num_growth_steps=growth)
    found.append({**figures, 'target_chips': target_chips})
  return max(found, key=lambda figures: figures['tokens_per_second'])


def summarize(
  records: Sequence[StepRecord], times: Times, *, num_growth_steps: int
) -> dict[str, Any]:
  """Returns the figures of a run.

  Args:
    records: records of the rounds.
    times: seconds of the parts of a round.
    num_growth_steps: draft forwards beside a step of the target; 0 in serial
      mode.

  Returns:
    `tokens_per_second`, `tpot` (seconds per output token of a row),
    `acceptance_length` of a row and round, `hit_rate`, and `forwards_waited`,
    draft forwards a round that the target waited for. The first two are for
    devices with the given times.
  """
  num_rows = np.array([len(record.lengths) for record in records])
  num_tokens = np.array(
    [len(record.lengths) + record.num_accepted.sum() for record in records]
  )
  forwards = np.array([record.num_forwards for record in records])
  outcomes = sum(record.outcomes for record in records)
  seconds = Rounds(
    num_tokens=num_tokens,
    num_rounds=num_rows > 0,
    num_waits=forwards * (num_rows > 0),
    num_growth_steps=num_growth_steps,
  ).seconds(times)
  total = int(num_tokens.sum())
  return {
    'tokens_per_second': float(total / seconds.sum()),
    'tpot': float((seconds * num_rows).sum() / total),
    'acceptance_length': float(total / num_rows.sum()),
    'hit_rate': float(outcomes[-1] / max(outcomes.sum(), 1)),
    'forwards_waited': float(forwards[num_rows > 0].mean()),
    'num_rounds': int((num_rows > 0).sum()),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the figures as text."""
  columns = {
    'variant': ('variant',),
    'rows': ('batch_size',),
    'tokens/s': ('tokens_per_second', '.0f'),
    'tpot ms': ('tpot', '.2f', 1e3),
    'chips': ('target_chips',),
    'tokens': ('acceptance_length', '.2f'),
    'hits': ('hit_rate', '.2f'),
    'waited': ('forwards_waited', '.2f'),
  }
  return benchmark_report.table_of(rows, columns, num_names=1)
