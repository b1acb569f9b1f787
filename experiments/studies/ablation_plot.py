"""The pictures of the ablation."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure as figure_lib
from matplotlib import ticker

from experiments.studies import ablation_report, ablation_settings

_GRAY, _ORANGE, _BLUE = '#8c8c8c', '#e69f00', '#0072b2'
_COLORS = {'autoregressive': _GRAY, 'serial': _ORANGE, 'async': _BLUE}
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
  height = 1.8 + 0.45 * len(rows)
  figure = figure_lib.Figure(figsize=(8, height), layout='constrained')
  axes = figure.subplots()
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
  return _png(figure, title, [axes])


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
  figure = figure_lib.Figure(figsize=(10, 4), layout='constrained')
  panels = figure.subplots(1, len(curves), sharey=True)
  for axes, (field, modes) in zip(panels, curves.items(), strict=True):
    for mode, points in modes.items():
      axes.plot(*zip(*points, strict=True), 'o-', color=_COLORS[mode],
                label=mode)  # fmt: skip
    values = sorted({value for points in modes.values() for value, _ in points})
    axes.set_xticks(values)
    axes.set_xlabel(_LABELS[field])
    plain = [r for r in rows if r['name'] == 'autoregressive']
    if plain and plain[0]['tokens_per_second']:
      axes.axhline(
        plain[0]['tokens_per_second'],
        color=_GRAY,
        linestyle='--',
        label='autoregressive',
      )
  panels[0].set_ylabel('tokens per second')
  panels[0].set_ylim(bottom=0)
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc='outside lower center', ncols=3, frameon=False
  )
  return _png(figure, title, panels)


def draw_acceptance(
  rows: Sequence[Mapping[str, Any]], title: str
) -> bytes | None:
  """Returns a PNG of acceptance in serial and async mode; None without."""
  pairs = ablation_report.compare_acceptance(rows)
  if not pairs:
    return None
  labels, *lengths = zip(*pairs, strict=True)
  figure = figure_lib.Figure(
    figsize=(8, 1.8 + 0.5 * len(pairs)), layout='constrained'
  )
  axes = figure.subplots()
  places = np.arange(len(pairs))
  for mode, values, shift in zip(
    ('serial', 'async'), lengths, (-0.2, 0.2), strict=True
  ):
    bars = axes.barh(
      places + shift, values, 0.38, label=mode, color=_COLORS[mode]
    )
    axes.bar_label(bars, fmt='%.2f', padding=3, fontsize='small')
  axes.set_yticks(places, [_spell(label) for label in labels])
  axes.invert_yaxis()
  axes.margins(x=0.12)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_xlabel('acceptance length (tokens a round, bonus included)')
  figure.legend(loc='outside lower center', ncols=2, frameon=False)
  return _png(figure, title, [axes])


def _spell(label: str) -> str:
  field, _, value = label.rpartition('_')
  return f'{field} = {value}' if field else label


def _png(figure, title, panels) -> bytes:
  for axes in panels:
    axes.spines[['top', 'right']].set_visible(False)
  figure.suptitle(title, fontsize='medium')
  output = io.BytesIO()
  figure.savefig(output, format='png', dpi=150)
  return output.getvalue()
