"""The picture of a draft's evaluation: acceptance by position and by task."""

import io
from collections.abc import Sequence

from matplotlib import figure as figure_lib

from experiments.measuring import (
  benchmark_plot,
  benchmark_report,
  evaluation_report,
)
from experiments.output.benchmark_output import Record

_COLORS = dict(
  zip(evaluation_report.MODES, ('#8c8c8c', '#e69f00', '#0072b2'), strict=True)
)


def draw(records: Sequence[Record], title: str) -> bytes:
  """Returns a PNG.

  Args:
    records: records of `evaluation_report.MODES`; not empty.
    title: title, with the machine that it was measured on.
  """
  summary = benchmark_report.summarize(
    records, evaluation_report.MODES, is_greedy=False
  )
  tasks = list(dict.fromkeys(record.task for record in records))
  groups = ['all tasks', *tasks] if len(tasks) > 1 else tasks
  width = max(9, 4 + 1.2 * len(groups))
  figure = figure_lib.Figure(figsize=(width, 4.6), layout='constrained')
  positions, lengths = figure.subplots(1, 2, width_ratios=[4, width - 4])
  _positions(positions, records, tasks)
  benchmark_plot.bars(
    lengths,
    summary,
    list(summary),
    groups,
    'acceptance_length',
    '{:.2f}',
    _COLORS,
  )
  lengths.set_xticks(range(len(groups)), groups, rotation=20, ha='right')
  lengths.set_ylabel('tokens a round, bonus included')
  lengths.legend(frameon=False, ncols=len(summary), loc='upper right')
  lengths.margins(y=0.25)
  figure.suptitle(title, fontsize='medium')
  output = io.BytesIO()
  figure.savefig(output, format='png', dpi=150)
  return output.getvalue()


def _positions(axes, records, tasks):
  """Draws the acceptance at each position of the chain, a line a task."""
  chain = [r for r in records if r.mode == evaluation_report.CHAIN]
  kinds = {task: [r for r in chain if r.task == task] for task in tasks}
  if len(tasks) > 1:
    kinds['all tasks'] = chain
  places = range(1, evaluation_report.CHAIN_LENGTH + 1)
  for kind, own in kinds.items():
    if own:
      is_all = kind == 'all tasks'
      axes.plot(
        places,
        evaluation_report.acceptance_per_position(own),
        'o-',
        label=kind,
        color='black' if is_all else None,
        linewidth=2.5 if is_all else 1,
      )
  axes.set_xticks(places)
  axes.set_ylim(0, 1)
  axes.set_xlabel('position in the chain')
  axes.set_ylabel('share of the rounds that accept it')
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(frameon=False, fontsize='small')
