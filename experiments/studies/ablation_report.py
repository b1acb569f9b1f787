"""The rows of the ablation: medians over the repeats, ratios last."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measuring import benchmark_report
from experiments.output.benchmark_output import Record
from experiments.studies import ablation_settings
from experiments.studies.ablation_settings import Configuration

_OF_TIMELINE = ('target_step_seconds', 'draft_step_seconds', 'overlap_fraction')


def make_rows(
  configurations: Sequence[Configuration],
  records: Sequence[Record],
  timelines: Mapping[str, Mapping[str, float]],
  *,
  is_greedy: bool,
) -> list[dict[str, Any]]:
  """Returns a row for each configuration that has results.

  Args:
    configurations: configurations in the order of the rows.
    records: records with the names of configurations as modes.
    timelines: figures of a timeline for each configuration with a tree.
    is_greedy: whether equal outputs are expected.

  Returns:
    The rows of rows.jsonl, seconds in seconds. A figure that a configuration
    does not have is None.
  """
  names = [configuration.name for configuration in configurations]
  summary = benchmark_report.summarize(records, names, is_greedy=is_greedy)
  repeats = [
    benchmark_report.summarize(
      [record for record in records if record.repeat == repeat],
      names,
      is_greedy=is_greedy,
    )
    for repeat in sorted({record.repeat for record in records})
  ]
  rows = []
  for configuration in configurations:
    name = configuration.name
    if name not in summary:
      continue
    figures = summary[name]
    own = [repeat[name] for repeat in repeats if name in repeat]
    timeline = timelines.get(name, {})
    rows.append(
      {
        'name': name,
        'settings': configuration.to_json(),
        'tokens_per_second': _median(own, 'tokens_per_second'),
        'speedup': _median(own, 'speedup'),
        'round_seconds': _round_seconds(records, name),
        **{key: timeline.get(key) for key in _OF_TIMELINE},
        **{
          key: figures[key]
          for key in (
            'acceptance_length',
            'hit_rate',
            'late_hit_rate',
            'miss_rate',
            'host_seconds_per_round',
            'outputs_equal',
            'num_prompts',
            'forced_acceptance',
          )
        },
        'num_repeats': len(own),
      }
    )
  return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows as text for a terminal, times in milliseconds."""
  columns = {
    'configuration': ('name',),
    'bs/w/d': _sizes,
    'tokens/s': ('tokens_per_second', '.1f'),
    'speedup': ('speedup', '.2f'),
    'round': ('round_seconds', '.2f', 1e3),
    'target': ('target_step_seconds', '.2f', 1e3),
    'draft': ('draft_step_seconds', '.2f', 1e3),
    'overlap': ('overlap_fraction', '.2f'),
    'acc. length': ('acceptance_length', '.2f'),
    'hit/late/miss': benchmark_report.outcome_rates,
    'host': ('host_seconds_per_round', '.2f', 1e3),
    'equal': lambda r: {None: '-', True: 'yes', False: 'NO'}[
      r['outputs_equal']
    ],
  }
  return benchmark_report.table_of(rows, columns, num_names=1)


def _sizes(row: Mapping[str, Any]) -> str:
  names = ('num_nodes', 'width', 'num_draft_steps')
  sizes = [row['settings'].get(name) for name in names]
  return '-' if None in sizes else '/'.join(map(str, sizes))


def sweep(
  rows: Sequence[Mapping[str, Any]], mode: str, field: str
) -> list[tuple[int, float]]:
  """Returns values of a size and the tokens per second, in ascending order."""
  points = {}
  for row in rows:
    is_base = row['name'] == mode
    prefix = ablation_settings.sweep_name(mode, field, '')
    if is_base or row['name'].startswith(prefix):
      points[row['settings'][field]] = row['tokens_per_second']
  return sorted(
    (value, speed) for value, speed in points.items() if speed is not None
  )


def _median(figures, key) -> float | None:
  values = [f[key] for f in figures if f[key] is not None]
  return statistics.median(values) if values else None


def _round_seconds(records, name) -> float | None:
  """Median over the repeats of the mean time of a round."""
  repeats: dict[int, list[Record]] = {}
  for record in records:
    if record.mode == name:
      repeats.setdefault(record.repeat, []).append(record)
  return statistics.median(
    sum(record.decode_seconds for record in own)
    # The first round gives the tokens from which the seconds count.
    / max(sum(record.num_rounds - 1 for record in own), 1)
    for own in repeats.values()
  )
