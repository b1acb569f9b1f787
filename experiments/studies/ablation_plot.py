"""The pictures of the ablation."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker

from experiments.studies import (
  ablation_report,
  ablation_settings,
  acceptance_loss,
)
from swiftspec_jax.cli import plots

_COLORS = {
  'autoregressive': plots.GREY,
  'serial': plots.ORANGE,
  'async': plots.BLUE,
}
_LABELS = {
  'num_nodes': 'nodes verified (bs)',
  'width': 'leaves expanded (w)',
  'num_draft_steps': 'draft forwards (d)',
}


def draw_speed(rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
  """Returns a PNG of the speed of the main rows; None without any."""
  rows = [
    row
    for row in rows
    if row['name'] in ablation_settings.MAIN
    and row['tokens_per_second'] is not None
  ]
  if not rows:
    return None
  figure, (axes,) = plots.make_figure(8, 1.8 + 0.45 * len(rows))
  labels = [
    f'{row["tokens_per_second"]:.1f}'
    + ('' if row['speedup'] is None else f'  ({row["speedup"]:.2f}x)')
    for row in rows
  ]
  bars = axes.barh(
    [row['name'].replace('_', ', ') for row in rows],
    [row['tokens_per_second'] for row in rows],
    color=[_COLORS[row['settings']['mode']] for row in rows],
  )
  axes.bar_label(bars, labels, padding=3, fontsize='small')
  axes.invert_yaxis()
  axes.margins(x=0.2)
  axes.set_xlabel('tokens per second (speedup over autoregressive)')
  return plots.png(figure, title)


def draw_sweeps(rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
  """Returns a PNG of the speed over each size; None without a sweep."""
  curves = {
    field: {
      mode: points
      for mode in ('serial', 'async')
      if (points := ablation_report.sweep(rows, mode, field))
    }
    for field in ablation_settings.SWEEPS
  }
  if not any(len(p) > 1 for modes in curves.values() for p in modes.values()):
    return None
  plain = [
    row['tokens_per_second'] for row in rows if row['name'] == 'autoregressive'
  ]
  figure, panels = plots.make_figure(10, 4, len(curves), sharey=True)
  for axes, (field, modes) in zip(panels, curves.items(), strict=True):
    for mode, points in modes.items():
      axes.plot(*zip(*points, strict=True), 'o-', color=_COLORS[mode],
                label=mode)  # fmt: skip
    axes.set_xticks(sorted({v for points in modes.values() for v, _ in points}))
    axes.set_xlabel(_LABELS[field])
    if any(plain):
      axes.axhline(plain[0], color=plots.GREY, linestyle='--',
                   label='autoregressive')  # fmt: skip
  panels[0].set_ylabel('tokens per second')
  panels[0].set_ylim(bottom=0)
  plots.legend_below(panels[0])
  return plots.png(figure, title)


def draw_acceptance(
  rows: Sequence[Mapping[str, Any]], title: str
) -> bytes | None:
  """Returns a PNG of `acceptance_loss.make_rows`; None without any."""
  rows = [row for row in rows if row['task'] == acceptance_loss.ALL]
  if not rows:
    return None
  figure, (axes,) = plots.make_figure(8, 1.8 + 0.5 * len(rows))
  plots.bars(
    axes,
    [' = '.join(row['settings'].rsplit('_', 1)) for row in rows],
    {mode: [row[mode] for row in rows] for mode in ('serial', 'async')},
    _COLORS,
    is_horizontal=True,
  )
  axes.margins(x=0.12)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_xlabel('acceptance length (tokens a round, bonus included)')
  plots.legend_below(axes)
  return plots.png(figure, title)
