"""The picture of asynchronous trees in batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.output import plots

# What is chosen often covers others.
_STYLES = (
  (plots.GREY, 'o-'),
  (plots.ORANGE, 'o-'),
  (plots.BLUE, 'o-'),
  (plots.GREEN, 'o:'),
)


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
  """Returns a PNG of speed and of time per token over the batch's size."""
  panels = (
    ('tokens_per_second', 1, 'tokens a second, all rows'),
    ('tpot', 1e3, 'milliseconds a token of one row'),
  )
  figure, all_axes = plots.make_figure(10, 4.2, len(panels))
  variants = list(dict.fromkeys(row['variant'] for row in rows))
  for axes, (name, scale, label) in zip(all_axes, panels, strict=True):
    for variant, (color, style) in zip(variants, _STYLES, strict=True):
      own = [row for row in rows if row['variant'] == variant]
      sizes = [row['batch_size'] for row in own]
      values = [scale * row[name] for row in own]
      axes.plot(sizes, values, style, color=color, label=variant)
    axes.set_xscale('log', base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xlabel('rows that decode together')
    axes.set_title(label, fontsize='medium')
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  return plots.png(figure, title)
