"""One round's tree as an SVG picture."""

import dataclasses
import html
import math
import unicodedata
from collections.abc import Collection, Sequence

from experiments.pictures import tree_layout
from experiments.pictures.tree_rounds import Node, Round
from swiftspec_jax import tree as tree_lib

_BOX_HEIGHT, _ROW_HEIGHT = 30, 36
_GAP, _MARGIN = 34, 10  # between columns; around the tree
_HALO = 5  # how far it reaches beyond the box
_NAME_WIDTH, _WEIGHT_WIDTH, _PADDING = 7.9, 5.6, 16  # of a character; a box
_MINUS = '\N{MINUS SIGN}'
_MAX_CHARS = 16  # of a token that is drawn
_VISIBLE = {' ': '␣', '\n': '↵', '\t': '⇥'}

# What the page needs besides for its pictures to look right.
STYLE = """
.trees svg .name { font-size: 13px; fill: #1f2937; }
.trees svg .weight { font-size: 10px; fill: #475569;
  font-family: system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
.trees svg .box { fill: #fff; stroke: #94a3b8; stroke-width: 1.2; }
.trees svg .candidate .box { stroke-dasharray: 4 3; }
.trees svg .sent .box { fill: #dbeafe; stroke: #2563eb; }
.trees svg .sent .weight { fill: #3b5a8c; }
.trees svg .root .box { fill: #1f2937; stroke: #1f2937; }
.trees svg .accepted .box { fill: #15803d; stroke: #14532d; }
.trees svg .root .name, .trees svg .accepted .name { fill: #fff; }
.trees svg .root .weight, .trees svg .accepted .weight { fill: #d1fae5; }
.trees svg .next .box { fill: #fbbf24; stroke: #92400e; stroke-width: 1.8; }
.trees svg .next .weight { fill: #713f12; }
.trees svg .missed .box { fill: #fff; stroke: #dc2626; stroke-width: 1.8;
  stroke-dasharray: 4 3; }
.trees svg .missed text { fill: #b91c1c; }
.trees svg .dropped { opacity: 0.68; }
.trees svg .halo { fill: #fdf0b8; stroke: #fdf0b8; }
.trees svg .edge, .trees svg .band { fill: none; }
.trees svg .edge { stroke: #94a3b8; }
.trees svg .edge.accepted { stroke: #15803d; }
.trees svg .edge.next { stroke: #d97706; }
.trees svg .edge.missed { stroke: #dc2626; stroke-dasharray: 4 3; }
.trees svg .band { stroke: #fdf0b8; stroke-width: 14; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Box:
  """A node, or the next token where the tree lacks it."""

  classes: str
  name: str
  weight: str
  about: str
  column: int
  row: int
  parent: int | None
  share: float  # probability after the parent, as the draft sees it
  is_kept: bool


def visible(text: str) -> str:
  """Returns the text with white space and control characters spelled out."""
  return ''.join(
    _VISIBLE.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text
  )


def draw(round_: Round, chosen: Collection[int]) -> str:
  """Returns the tree as an SVG element.

  Args:
    round_: round whose tree is drawn.
    chosen: the nodes to be drawn, as `tree_layout.choose` returns them.
  """
  boxes = _boxes(round_, chosen)
  widths = _column_widths(boxes.values())
  lefts = [_MARGIN]
  for width in widths:
    lefts.append(lefts[-1] + width + _GAP)

  def curve(box):
    above = boxes[box.parent]
    start = lefts[above.column] + widths[above.column], _middle(above)
    end = lefts[box.column], _middle(box)
    bend = start[0] + _GAP / 2
    return (
      f'M{start[0]:.1f} {start[1]:.1f}C{bend:.1f} {start[1]:.1f} '
      f'{bend:.1f} {end[1]:.1f} {end[0]:.1f} {end[1]:.1f}'
    )

  curves = {i: curve(box) for i, box in boxes.items() if box.parent is not None}
  halos, bands, edges, shapes = [], [], [], []
  for i, box in boxes.items():
    left, width = lefts[box.column], widths[box.column]
    if box.is_kept:
      halos.append(_halo(box, left, width))
    if i in curves:
      edges.append(
        f'<path class="edge {box.classes}" d="{curves[i]}" '
        f'stroke-width="{0.8 + 2.7 * box.share:.2f}" />'
      )
      if box.is_kept and boxes[box.parent].is_kept:
        bands.append(f'<path class="band" d="{curves[i]}" />')
    shapes.append(_shape(box, left, width))
  height = max(map(_top, boxes.values())) + _BOX_HEIGHT + _MARGIN
  body = '\n'.join(bands + halos + edges + shapes)
  return (
    '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
    f'width="{lefts[-1] - _GAP + _MARGIN:.0f}" height="{height:.0f}">\n'
    f'{body}\n</svg>'
  )


def _boxes(round_: Round, chosen: Collection[int]) -> dict[int, _Box]:
  """Returns what is drawn, by node; the missing token gets a new number."""
  nodes = round_.nodes
  children = tree_layout.children_of(nodes, chosen)
  missing = len(nodes)
  if round_.outcome == tree_lib.MISS:
    path = [i for i in chosen if nodes[i].is_accepted]
    last = max(path, key=lambda i: nodes[i].depth, default=0)
    children[last].insert(0, missing)
    children[missing] = []
  rows = tree_layout.rows_of(children)
  boxes = {i: _node_box(nodes, i, rows[i]) for i in children if i != missing}
  if missing in children:
    boxes[missing] = _Box(
      classes='missed',
      name=_short(round_.emitted[-1]),
      weight='not in the tree',
      about='the next token, which is not in the tree',
      column=nodes[last].depth + 1,
      row=rows[missing],
      parent=last,
      share=0.3,
      is_kept=False,
    )
  return boxes


def _node_box(nodes: Sequence[Node], i: int, row: int) -> _Box:
  node = nodes[i]
  share = 1.0
  if node.parent is not None:
    share = math.exp(node.log_prob - nodes[node.parent].log_prob)
  about = [
    f'{visible(node.text)} (token {node.token_id}), depth {node.depth}',
    f'probability after its parent {_percent(share)}',
    f'weight {_percent(math.exp(node.log_prob))}, its logarithm '
    f'{_log(node.log_prob)}',
    'expanded' if node.is_expanded else 'candidate',
  ]
  flags = {
    'the root': node.parent is None,
    'sent': node.is_sent,
    'accepted': node.is_accepted,
    'the next token': node.is_next,
    'kept for the next round': node.is_kept,
  }
  about += [name for name, holds in flags.items() if holds]
  return _Box(
    classes=_classes(node),
    name=_short(node.text),
    weight=f'{_percent(math.exp(node.log_prob))} · {_log(node.log_prob)}',
    about='\n'.join(about),
    column=node.depth,
    row=row,
    parent=node.parent,
    share=share,
    is_kept=node.is_kept,
  )


def _classes(node: Node) -> str:
  is_root = node.parent is None
  is_dropped = not (is_root or node.is_accepted or node.is_kept)
  flags = {
    'root': is_root,
    'candidate': not node.is_expanded,
    'sent': node.is_sent,
    'accepted': node.is_accepted,
    'next': node.is_next,
    'dropped': is_dropped,
  }
  return ' '.join(name for name, holds in flags.items() if holds)


def _short(text: str) -> str:
  shown = visible(text)
  if len(shown) > _MAX_CHARS:
    shown = f'{shown[: _MAX_CHARS - 1]}…'
  return shown or '∅'


def _percent(share: float) -> str:
  percent = 100 * share
  if percent < 0.1:
    return '<0.1%'
  return f'{percent:.0f}%' if percent >= 9.95 else f'{percent:.1f}%'


def _log(value: float) -> str:
  sign = _MINUS if value < 0 else ''
  return f'{sign}{abs(value):.2f}'


def _column_widths(boxes: Collection[_Box]) -> list[float]:
  widths = [0.0] * (1 + max(box.column for box in boxes))
  for box in boxes:
    num_cells = sum(
      2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in box.name
    )
    width = _PADDING + max(
      _NAME_WIDTH * num_cells, _WEIGHT_WIDTH * len(box.weight)
    )
    widths[box.column] = max(widths[box.column], width)
  return widths


def _top(box: _Box) -> float:
  return _MARGIN + box.row * _ROW_HEIGHT


def _middle(box: _Box) -> float:
  return _top(box) + _BOX_HEIGHT / 2


def _halo(box: _Box, left: float, width: float) -> str:
  return (
    f'<rect class="halo" x="{left - _HALO:.1f}" y="{_top(box) - _HALO}" '
    f'width="{width + 2 * _HALO:.1f}" height="{_BOX_HEIGHT + 2 * _HALO}" '
    'rx="9" />'
  )


def _shape(box: _Box, left: float, width: float) -> str:
  center, top = left + width / 2, _top(box)
  return (
    f'<g class="node {box.classes}"><title>{html.escape(box.about)}</title>'
    f'<rect class="box" x="{left:.1f}" y="{top}" width="{width:.1f}" '
    f'height="{_BOX_HEIGHT}" rx="5" />'
    f'<text class="name" text-anchor="middle" x="{center:.1f}" '
    f'y="{top + 13}">{html.escape(box.name)}</text>'
    f'<text class="weight" text-anchor="middle" x="{center:.1f}" '
    f'y="{top + 25}">{html.escape(box.weight)}</text></g>'
  )
