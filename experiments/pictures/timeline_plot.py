"""The picture of a timeline: a track for each mesh, transfers and the host."""

import math
from collections.abc import Sequence

from matplotlib import figure as figure_lib
from matplotlib import patches

from swiftspec_jax import errors
from swiftspec_jax.cli import plots
from swiftspec_jax.runtime import timeline as timeline_lib

_COLORS = {
  'verify': plots.BLUE,
  'grow': plots.GREEN,
  'advance': plots.ORANGE,
  'expected': plots.RED,
  'verdict': plots.PINK,
  'proposal': '#882255',
  'dispatch': '#555555',
  'wait': '#d9d9d9',
  'read': plots.SKY,
}
_HEIGHT = 0.6  # of a bar; tracks are 1 apart
_LABEL_SHARE = 0.05  # of the width, from which on a bar has its name in it


def draw(
  spans: Sequence[timeline_lib.Span], num_rounds: int = 4, skip: int = 1
) -> bytes:
  """Returns a PNG of what `make_figure` draws."""
  return plots.png(make_figure(spans, num_rounds, skip))


def make_figure(
  spans: Sequence[timeline_lib.Span], num_rounds: int = 4, skip: int = 1
) -> figure_lib.Figure:
  """Draws some rounds.

  Args:
    spans: result of `Timeline.finish`.
    num_rounds: rounds to draw; fewer are drawn if there are no more.
    skip: rounds left out at the beginning.

  Raises:
    UserError: no rounds are left.
  """
  # The host reads a round while the devices are in later ones, so what is
  # drawn is a stretch of time.
  starts = sorted(span.start for span in spans if span.name == 'verify')
  ends = max((span.end for span in spans), default=math.nan)
  starts = [*starts, ends][skip:][: num_rounds + 1]
  if len(starts) < 2:
    raise errors.UserError(
      f'there is no round to draw after the first {skip}; decode more tokens'
    )
  begin, end = starts[0], starts[-1]
  shown = [s for s in spans if s.start < end and s.end > begin]
  figure, (axes,) = plots.make_figure(11, 3.2)
  for span in shown:
    _draw_bar(axes, span, begin, end)
  for start in starts:
    axes.axvline((start - begin) * 1e3, color='#777777', lw=0.8, ls=':')
  axes.set_yticks(range(len(timeline_lib.TRACKS)), timeline_lib.TRACKS)
  axes.set_ylim(len(timeline_lib.TRACKS) - 0.5, -0.5)
  axes.set_xlim(0, (end - begin) * 1e3)
  axes.set_xlabel('milliseconds; at a dotted line a verification starts')
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0)
  names = {span.name for span in shown}
  handles = [
    patches.Patch(color=color, label=name)
    for name, color in _COLORS.items()
    if name in names
  ]
  figure.legend(
    handles=handles,
    loc='outside upper center',
    ncols=len(handles),
    frameon=False,
  )
  return figure


def _draw_bar(axes, span, begin, end) -> None:
  """Draws the part of a span that lies between `begin` and `end`."""
  left, right = max(span.start, begin), min(span.end, end)
  place = timeline_lib.TRACKS.index(span.track)
  axes.barh(
    place,
    (right - left) * 1e3,
    _HEIGHT,
    (left - begin) * 1e3,
    color=_COLORS[span.name],
  )
  if (right - left) / (end - begin) > _LABEL_SHARE:
    axes.text(
      ((left + right) / 2 - begin) * 1e3,
      place,
      f'{span.name}\n{(span.end - span.start) * 1e3:.1f} ms',
      color='black' if span.name == 'wait' else 'white',
      ha='center',
      va='center',
      fontsize='x-small',
    )
