"""The picture of a section: times beside those of the reference."""

from collections.abc import Sequence

from matplotlib import figure as figure_lib

from experiments.accelerator.rows import Row
from swiftspec_jax.cli import plots

_MOST_BARS = 40


def draw(rows: Sequence[Row]) -> figure_lib.Figure | None:
  """Returns bars of seconds beside those of the reference; None without."""
  found = [
    row
    for row in rows
    if row.seconds and row.reference_seconds
    if not row.name.endswith(' reference')
  ][:_MOST_BARS]
  if not found:
    return None
  figure, (axes,) = plots.make_figure(11, 1.2 + 0.32 * len(found))
  times = {
    'reference': [row.reference_seconds * 1e3 for row in found],
    'measured': [row.seconds * 1e3 for row in found],
  }
  colors = {'reference': plots.GREY, 'measured': plots.BLUE}
  plots.bars(axes, _names(found), times, colors, '', is_horizontal=True)
  for place, (reference, own) in enumerate(zip(*times.values(), strict=True)):
    axes.annotate(
      f'{reference / own:.2f}x',
      (max(own, reference), place),
      (4, 0),
      textcoords='offset points',
      va='center',
    )
  axes.set_xscale('log')
  axes.margins(x=0.15)
  axes.set_xlabel('milliseconds')
  plots.legend_below(axes)
  return figure


def _names(rows: Sequence[Row]) -> list[str]:
  labels = [f'{row.name}  {row.shape}' for row in rows]
  return [label if len(label) < 75 else f'{label[:72]}...' for label in labels]
