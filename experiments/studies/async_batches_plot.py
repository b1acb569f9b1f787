"""The picture of asynchronous trees in batches."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as figure_lib

# Safe for the colour-blind (Okabe and Ito). What is chosen often covers others.
_COLORS = ('#8c8c8c', '#e69f00', '#0072b2', '#009e73')
_STYLES = ('o-', 'o-', 'o-', 'o:')


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
  """Returns a PNG of speed and of time per token over the batch's size."""
  figure = figure_lib.Figure(figsize=(10, 4.2), layout='constrained')
  panels = (
    ('tokens_per_second', 1, 'tokens a second, all rows'),
    ('tpot', 1e3, 'milliseconds a token of one row'),
  )
  variants = list(dict.fromkeys(row['variant'] for row in rows))
  for axes, (name, scale, label) in zip(
    figure.subplots(1, len(panels)), panels, strict=True
  ):
    for variant, color, style in zip(variants, _COLORS, _STYLES, strict=True):
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
  figure.suptitle(title)
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=120)
  return buffer.getvalue()
