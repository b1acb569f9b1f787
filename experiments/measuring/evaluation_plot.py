"""The picture of a draft's evaluation: acceptance by position and by task."""

from collections.abc import Sequence

from experiments.measuring import (
  benchmark_plot,
  benchmark_report,
  evaluation_report,
)
from experiments.output.benchmark_output import Record
from swiftspec_jax.cli import plots

_COLORS = dict(
  zip(
    evaluation_report.MODES,
    (plots.GREY, plots.ORANGE, plots.BLUE),
    strict=True,
  )
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
  groups = benchmark_plot.groups_of([record.task for record in records])
  width = max(9, 4 + 1.2 * len(groups))
  figure, (positions, lengths) = plots.make_figure(
    width, 4.6, 2, width_ratios=[4, width - 4]
  )
  _draw_positions(positions, records, groups)
  values = benchmark_plot.values_of(summary, groups, 'acceptance_length')
  plots.bars(lengths, groups, values, _COLORS)
  lengths.set_xticks(range(len(groups)), groups, rotation=20, ha='right')
  lengths.set_ylabel('tokens a round, bonus included')
  lengths.legend(frameon=False, ncols=len(summary), loc='upper right')
  lengths.margins(y=0.25)
  return plots.png(figure, title)


def _draw_positions(axes, records, groups):
  """Draws the acceptance at each position of the chain, a line a task."""
  chain = [r for r in records if r.mode == evaluation_report.CHAIN]
  places = range(1, evaluation_report.CHAIN_LENGTH + 1)
  # All tasks come last, as their line lies on top.
  for group in sorted(groups, key='all tasks'.__eq__):
    is_all = group == 'all tasks'
    if own := [r for r in chain if is_all or r.task == group]:
      axes.plot(
        places,
        evaluation_report.acceptance_per_position(own),
        'o-',
        label=group,
        color='black' if is_all else None,
        linewidth=2.5 if is_all else 1,
      )
  axes.set_xticks(places)
  axes.set_ylim(0, 1)
  axes.set_xlabel('position in the chain')
  axes.set_ylabel('share of the rounds that accept it')
  axes.legend(frameon=False, fontsize='small')
