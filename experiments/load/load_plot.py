"""The pictures of a load experiment."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker

from swiftspec_jax.cli import plots
from swiftspec_jax.cli.flags import policy_names

_COLORS = (
  plots.ORANGE, plots.SKY, plots.GREEN, plots.PINK, plots.RED, plots.BLUE,
)  # fmt: skip
_LINES = {
  policy_names.NO_SPECULATION: {'color': plots.GREY, 'linestyle': '--'},
  policy_names.GOODPUT: {'color': 'black', 'linewidth': 2.5, 'zorder': 3},
}
# Of each picture its panels: the figure that is drawn, and what it is called.
_PANELS = {
  'latency': {
    'mean_e2e_latency': 'mean latency',
    'mean_ttft': 'mean time to first token',
    'mean_tpot': 'mean time per output token',
  },
  'lengths': {
    'mean_num_speculative_tokens': 'draft tokens verified, a row and step',
    'acceptance_length': 'acceptance length, bonus included',
  },
}


def draw(
  rows: Sequence[Mapping[str, Any]], title: str
) -> dict[str, bytes | None]:
  """Returns PNGs by name, figures over the rate; None without such figures.

  Args:
    rows: rows averaged over the seeds.
    title: heading of the pictures.
  """
  return {name: _draw(name, rows, title) for name in _PANELS}


def _draw(name, rows, title) -> bytes | None:
  panels = _PANELS[name]
  rows = [row for row in rows if next(iter(panels)) in row]
  if not rows:
    return None
  figure, all_axes = plots.make_figure(2 + 4 * len(panels), 4.5, len(panels))
  for axes, (key, label) in zip(all_axes, panels.items(), strict=True):
    _draw_lines(axes, rows, key)
    axes.set_title(label, fontsize='medium')
    if name == 'latency':
      axes.set_yscale('log')
      axes.yaxis.set_major_formatter(_spell_seconds)
      axes.yaxis.set_minor_formatter(ticker.NullFormatter())
      axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  plots.legend_below(all_axes[0])
  return plots.png(figure, title)


def _draw_lines(axes, rows, key: str) -> None:
  styles = itertools.cycle(itertools.product(('-', '-.', ':'), _COLORS))
  for policy in dict.fromkeys(row['policy'] for row in rows):
    points = [
      (row['request_rate'], row[key])
      for row in rows
      if row['policy'] == policy and key in row
    ]
    style = _LINES.get(policy) or dict(
      zip(('linestyle', 'color'), next(styles), strict=True)
    )
    if points:
      axes.plot(
        *zip(*points, strict=True), label=policy, marker='o', ms=4, **style
      )
  axes.set_xlabel('requests per second')


def _spell_seconds(value: float, _) -> str:
  return f'{value:g} s' if value >= 1 else f'{value * 1e3:g} ms'
