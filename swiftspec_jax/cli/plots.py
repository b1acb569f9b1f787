"""What all plots share: colors, axes, bars, legends and files."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib

# Safe for the colour-blind (Okabe and Ito).
GREY, BLUE, ORANGE, GREEN = '#8c8c8c', '#0072b2', '#e69f00', '#009e73'
PINK, SKY, RED, YELLOW = '#cc79a7', '#56b4e9', '#d55e00', '#f0e442'


def make_figure(
  width: float,
  height: float,
  num_columns: int = 1,
  num_rows: int = 1,
  **options,
) -> tuple[figure_lib.Figure, Sequence[axes_lib.Axes]]:
  """Returns a figure and its axes, row by row, without upper and right lines.

  Args:
    width: inches.
    height: inches.
    num_columns: axes beside each other.
    num_rows: axes above each other.
    **options: options of `Figure.subplots`.
  """
  figure = figure_lib.Figure(figsize=(width, height), layout='constrained')
  panels = figure.subplots(num_rows, num_columns, squeeze=False, **options)
  for axes in panels.flat:
    axes.spines[['top', 'right']].set_visible(False)
  return figure, panels.ravel()


def bars(
  axes: axes_lib.Axes,
  groups: Sequence[str],
  series: Mapping[str, Sequence[float | None]],
  colors: Mapping[str, str],
  form: str = '{:.2f}',
  *,
  is_horizontal: bool = False,
) -> None:
  """Draws a group of bars for each name of `groups`.

  Args:
    axes: axes to draw on.
    groups: names of the groups.
    series: values of the bars in each group, by label; None has no bar.
    colors: color of each label.
    form: form of the numbers at the bars.
    is_horizontal: whether bars go from left to right, the first group on top.
  """
  draw = axes.barh if is_horizontal else axes.bar
  text = ('small', 3) if is_horizontal else ('x-small', 1)
  size = 0.8 / len(series)
  for i, (label, values) in enumerate(series.items()):
    drawn = draw(
      np.arange(len(groups)) + (i - (len(series) - 1) / 2) * size,
      [value or 0 for value in values],
      0.92 * size,
      label=label,
      color=colors[label],
      zorder=2,
    )
    numbers = ['-' if v is None else form.format(v) for v in values]
    axes.bar_label(drawn, numbers, fontsize=text[0], padding=text[1])
  if is_horizontal:
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
  else:
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis='x', length=0)


def legend_below(axes: axes_lib.Axes, num_columns: int = 6) -> None:
  """Explains the labels of `axes` below the whole figure."""
  handles, labels = axes.get_legend_handles_labels()
  axes.figure.legend(
    handles,
    labels,
    loc='outside lower center',
    ncols=min(len(labels), num_columns),
    frameon=False,
  )


def png(figure: figure_lib.Figure, title: str | None = None) -> bytes:
  """Returns a figure as PNG, with a title above it."""
  if title is not None:
    figure.suptitle(title, fontsize='medium')
  output = io.BytesIO()
  figure.savefig(output, format='png', dpi=150)
  return output.getvalue()
