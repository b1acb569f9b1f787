"""What the results of a benchmark say: sums first, ratios last."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.measuring import llama_peer
from experiments.output.benchmark_output import Record
from swiftspec_jax.requests import results

BASELINE = 'autoregressive'
_NOT_COMPARED = llama_peer.PEERS  # have weights of their own


def summarize(
  records: Sequence[Record], modes: Sequence[str], *, is_greedy: bool
) -> dict[str, dict[str, Any]]:
  """Returns the figures of each mode, over all tasks and for each of them.

  Args:
    records: records of one benchmark, which may be incomplete.
    modes: the order of the result; modes without records are left out.
    is_greedy: whether equal outputs are expected.

  Returns:
    For each mode `tokens_per_second`, `speedup` over the baseline,
    `mean_ttft`, `mean_tpot`, `acceptance_length`,
    `acceptance_rate_per_position`, `chosen_lengths` (rounds by their draft
    tokens), `hit_rate`, `late_hit_rate` and `miss_rate` of its
    trees, `host_seconds_per_round`, `outputs_equal`, `num_outputs_equal`,
    `num_prompts`, `forced_acceptance` and the same for each of its `tasks`.
    Speedup and equality compare what both modes have measured. Figures are
    None where there is nothing to compare or to count; peers with weights of
    their own have no equality.
  """
  summary = {}
  for mode in modes:
    own = [record for record in records if record.mode == mode]
    if not own:
      continue
    baseline = [record for record in records if record.mode == BASELINE]
    tasks = dict.fromkeys(record.task for record in own)
    is_compared = is_greedy and mode not in _NOT_COMPARED
    of_tasks = {task: [r for r in own if r.task == task] for task in tasks}
    summary[mode] = {
      **_figures(own, baseline, is_compared),
      'tasks': {
        task: _figures(records_of_task, baseline, is_compared)
        for task, records_of_task in of_tasks.items()
      },
    }
  return summary


def describe_differences(records: Sequence[Record]) -> list[str]:
  """Returns a line for each output that leaves the baseline."""
  baseline = {_place(r): r.token_ids for r in records if r.mode == BASELINE}
  found = []
  for record in records:
    expected = baseline.get(_place(record))
    if record.mode in _NOT_COMPARED or expected in (None, record.token_ids):
      continue
    pairs = itertools.zip_longest(record.token_ids, expected)
    position = next(i for i, pair in enumerate(pairs) if pair[0] != pair[1])
    found.append(
      f'{record.mode}: the output for {record.question_id} differs from '
      f'{BASELINE} at token {position}'
    )
  return found


def speed(records: Sequence[Record]) -> float | None:
  """Returns tokens per second; None if no time was measured."""
  seconds = sum(record.decode_seconds for record in records)
  if not seconds:
    return None
  return sum(record.timed_tokens for record in records) / seconds


def forced_label(summary: dict[str, dict[str, Any]]) -> str:
  """Returns which modes had a draft that was told the output, and how often.

  Empty if there are none.
  """
  forced = {
    mode: figures['forced_acceptance']
    for mode, figures in summary.items()
    if figures['forced_acceptance'] is not None
  }
  if not forced:
    return ''
  return f'{_forced(next(iter(forced.values())))} in {", ".join(forced)}'


def table(summary: dict[str, dict[str, Any]]) -> str:
  """Returns the summary as text for a terminal."""
  rows = []
  for mode, figures in summary.items():
    forced = figures['forced_acceptance']
    label = mode if forced is None else f'{mode} ({_forced(forced)})'
    rows.append({'mode': label, 'task': 'all', **figures})
    if len(figures['tasks']) > 1:
      rows += [
        {'mode': '', 'task': task, **own}
        for task, own in figures['tasks'].items()
      ]
  return table_of(rows, _COLUMNS, num_names=2)


def table_of(
  rows: Sequence[Mapping[str, Any]],
  columns: Mapping[str, Callable[[Any], str] | tuple[Any, ...]],
  num_names: int,
) -> str:
  """Returns rows as text for a terminal, below a header.

  Args:
    rows: values by name.
    columns: cells by heading: a function that returns the cell of a row, or
      name and form of a value, and the factor that makes it what is shown. A
      value that a row lacks, or that is None, is a '-'.
    num_names: number of columns that stand to the left; others to the right.
  """

  def cell(row, name, form='', factor=None):
    if (value := row.get(name)) is None:
      return '-'
    return format(value if factor is None else factor * value, form)

  cells = [
    [c(row) if callable(c) else cell(row, *c) for c in columns.values()]
    for row in rows
  ]
  cells.insert(0, list(columns))
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = [
    '  '.join(
      f'{cell:<{width}}' if i < num_names else f'{cell:>{width}}'
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in cells
  ]
  return '\n'.join([lines[0], '-' * len(lines[0]), *lines[1:]])


def outcome_rates(row: Mapping[str, Any]) -> str:
  """Returns the rates of a row's hits, late hits and misses as a cell."""
  rates = [row[key] for key in ('hit_rate', 'late_hit_rate', 'miss_rate')]
  return '-' if None in rates else '/'.join(f'{rate:.2f}' for rate in rates)


def _forced(acceptance: float) -> str:
  return f'forced acceptance {acceptance:g}'


def _place(record: Record) -> tuple[int | str, int]:
  return record.question_id, record.repeat


def _figures(
  own: Sequence[Record], baseline: Sequence[Record], is_compared: bool
) -> dict[str, Any]:
  expected = {_place(record): record for record in baseline}
  common = [record for record in own if _place(record) in expected]
  references = [expected[_place(record)] for record in common]
  own_speed, reference_speed = speed(common), speed(references)
  figures = {
    'tokens_per_second': speed(own),
    'speedup': own_speed / reference_speed
    if own_speed and reference_speed
    else None,
    'mean_ttft': _mean([record.ttft_seconds for record in own]),
    'mean_tpot': _mean([record.tpot_seconds for record in own]),
    'acceptance_length': results.total_acceptance_length(own),
    'acceptance_rate_per_position': results.rate_per_position(own),
    'chosen_lengths': results.sums([record.chosen_lengths for record in own]),
    **results.tree_rates(own),
    'host_seconds_per_round': _host_seconds(own),
    'forced_acceptance': own[0].forced_acceptance,
    'outputs_equal': None,
    'num_outputs_equal': None,
    'num_prompts': len({record.question_id for record in own}),
  }
  if is_compared and common:
    unequal = {
      record.question_id
      for record, reference in zip(common, references, strict=True)
      if record.token_ids != reference.token_ids
    }
    compared = {record.question_id for record in common}
    figures['outputs_equal'] = not unequal
    figures['num_outputs_equal'] = len(compared) - len(unequal)
  return figures


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return sum(known) / len(known) if known else None


def _host_seconds(records: Sequence[Record]) -> float | None:
  seconds = [record.host_seconds for record in records]
  if None in seconds:
    return None
  return sum(seconds) / max(sum(record.num_rounds for record in records), 1)


def _equal(row: Mapping[str, Any]) -> str:
  equal = row['num_outputs_equal']
  return '-' if equal is None else f'{equal}/{row["num_prompts"]}'


_COLUMNS = {
  'mode': ('mode',),
  'task': ('task',),
  'prompts': ('num_prompts',),
  'tokens/s': ('tokens_per_second', '.1f'),
  'speedup': ('speedup', '.2f'),
  'acc. length': ('acceptance_length', '.2f'),
  'hit/late/miss': outcome_rates,
  'equal': _equal,
}
