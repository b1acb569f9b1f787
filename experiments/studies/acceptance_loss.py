"""What asynchronous rounds lose in acceptance, task by task.

A tree that grows while the target verifies spends forwards on what the verdict
then rules out. So a round accepts less than in serial mode, at equal sizes. How
much is a matter of the pair and the text, not of the machine: target and draft
meet once a round (SwiftSpec, algorithm 1).

Legend: N outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.measuring import benchmark_report
from experiments.output.benchmark_output import Record
from swiftspec_jax.requests import results

ALL = 'all'
# SwiftSpec, table 7, Qwen2-72B with 1.5B: serial and parallel acceptance, by
# the names that Spec-Bench has for the tasks. The means are of six tasks. The
# paper does not say whether the bonus token is counted.
TABLE_7 = {
  ALL: (3.63, 3.34),
  'math_reasoning': (4.20, 3.78),
  'mt_bench': (3.42, 3.11),
  'qa': (3.12, 2.74),
  'summarization': (3.72, 3.56),
}
_NUM_DRAWS = 2000
_CONFIDENCE = 0.95


def make_rows(
  names: Sequence[str], records: Sequence[Record]
) -> list[dict[str, Any]]:
  """Returns a row for all tasks and for each, of each pair of configurations.

  Args:
    names: names of configurations; those that differ in the mode alone are
      compared.
    records: records with these names as modes.

  Returns:
    Rows with acceptance lengths, bonus token included, and `ratio`, async over
    serial, with the bounds of its interval of 95 %. `draft_ratio` is that of
    the accepted draft tokens alone. Outputs that one of both has not measured
    do not count.
  """
  rows = []
  for label, serial, asynchronous in _pairs(names):
    both = [
      {r.key[::2]: r for r in records if r.mode == mode}
      for mode in (serial, asynchronous)
    ]
    common = [
      (own, both[1][key]) for key, own in both[0].items() if key in both[1]
    ]
    tasks = dict.fromkeys(own.task for own, _ in common)
    for task in (ALL, *tasks) if common else ():
      chosen = [p for p in common if task in (ALL, p[0].task)]
      rows.append({'settings': label, 'task': task, **_figures(chosen)})
  return rows


def _pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
  """Returns settings, and the names of their serial and async configuration."""
  found = []
  for name in names:
    rival = name.replace('serial', 'async', 1)
    if name.startswith('serial') and rival in names:
      label = name.removeprefix('serial').strip('_') or 'base'
      found.append((label, name, rival))
  return found


def _figures(pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
  serial, asynchronous = zip(*pairs, strict=True)
  return {
    'num_outputs': len(pairs),
    'outputs_equal': all(a.token_ids == b.token_ids for a, b in pairs),
    'serial': results.total_acceptance_length(serial),
    'async': results.total_acceptance_length(asynchronous),
    **_ratios('ratio', pairs, bonus=1),
    **_ratios('draft_ratio', pairs, bonus=0),
    **results.tree_rates(asynchronous),
  }


def _ratios(
  name: str, pairs: Sequence[tuple[Record, Record]], bonus: int
) -> dict[str, float | None]:
  """Returns the ratio and its interval by the bootstrap.

  Each draw takes other prompts, with replacement, as many of each task as there
  are; repeats of a prompt stay together. A draw without accepted tokens in
  serial mode has no ratio.
  """
  tasks = {own.question_id: own.task for own, _ in pairs}
  index = {question_id: i for i, question_id in enumerate(tasks)}
  counts = np.zeros((len(tasks), 2, 2), np.int64)
  for pair in pairs:
    found = [[r.num_accepted, r.num_rounds] for r in pair]
    counts[index[pair[0].question_id]] += found
  drawn = _draw(np.array([*tasks.values()]))
  sums = np.concatenate([counts.sum(0)[None], counts[drawn].sum(1)])
  lengths = bonus + sums[..., 0] / np.maximum(sums[..., 1], 1)
  serial, asynchronous = lengths.T[0], lengths.T[1]
  is_known = serial > 0
  if not is_known[0]:
    return {name: None, f'{name}_low': None, f'{name}_high': None}
  ratios = asynchronous[is_known] / serial[is_known]
  margin = (1 - _CONFIDENCE) / 2
  low, high = np.quantile(ratios[1:], (margin, 1 - margin))
  return {
    name: float(ratios[0]),
    f'{name}_low': float(low),
    f'{name}_high': float(high),
  }


def _draw(tasks: np.ndarray) -> np.ndarray:
  """Returns i[draws, n] the prompts of each draw; the seed is fixed."""
  rng = np.random.default_rng(0)
  own = [np.flatnonzero(tasks == task) for task in np.unique(tasks)]
  return np.concatenate(
    [rng.choice(places, (_NUM_DRAWS, len(places))) for places in own], axis=1
  )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows as text, beside the paper's; empty if there are none."""
  if not rows:
    return ''
  columns = {
    'acceptance length': ('settings',),
    'task': ('task',),
    'outputs': ('num_outputs',),
    'serial': ('serial', '.2f'),
    'async': ('async', '.2f'),
    'async/serial': ('ratio', '.3f'),
    '95 %': lambda r: f'{r["ratio_low"]:.3f} to {r["ratio_high"]:.3f}',
    'paper': lambda row: _published(row['task']),
    'draft tokens alone': ('draft_ratio', '.3f'),
    'equal': lambda row: 'yes' if row['outputs_equal'] else 'NO',
  }
  return benchmark_report.table_of(rows, columns, num_names=2)


def _published(task: str) -> str:
  if task not in TABLE_7:
    return '-'
  serial, parallel = TABLE_7[task]
  return f'{parallel / serial:.3f}'
