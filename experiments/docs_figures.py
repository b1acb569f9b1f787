"""Draws the figures of docs/how_it_works, which share one example.

  python -m experiments.docs_figures

The example is that of docs/how_it_works/token_tree.md: the target writes
t1 t3 t6 t9 t16, and the draft's tree begins t1, t2, t3, t5. Each figure is an
SVG with a card of its own, so that it can be read on light and dark pages.
"""

import html
import pathlib
from collections.abc import Sequence

from experiments import program
from experiments.output import benchmark_output

IMAGES = pathlib.Path(__file__).parents[1] / 'docs' / 'images'
_STYLE = """
  .card { fill: #ffffff; stroke: #cbd5e1 }
  text { fill: #1f2937; font: 14px system-ui, 'Segoe UI', sans-serif }
  .note { fill: #64748b; font-size: 12px }
  .good { fill: #009e73 } .sent { fill: #0072b2 } .bad { fill: #d55e00 }
  .new { fill: #b45309 } .box { fill: #e2e8f0 }
  .line { stroke: #64748b; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d }
    text { fill: #e5e7eb } .note { fill: #94a3b8 } .box { fill: #334155 }
    .line { stroke: #94a3b8 }
  }
  .strong { fill: #ffffff }
"""


def main() -> None:
  """Draws all figures."""
  for name, figure in FIGURES.items():
    benchmark_output.write(IMAGES / f'{name}.svg', figure().encode())


def box(x: float, y: float, width: float, kind: str, label: str) -> str:
  """Returns a box of a kind (`good`, `sent`, `bad`, `new` or `box`)."""
  style = '' if kind == 'box' else ' class="strong"'
  return (
    f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="28" rx="5"/>'
    f'<text{style} x="{x + width / 2}" y="{y + 19}" text-anchor="middle">'
    f'{html.escape(label)}</text>'
  )


def note(x: float, y: float, text: str, anchor: str = 'start') -> str:
  """Returns a small text."""
  return (
    f'<text class="note" x="{x}" y="{y}" text-anchor="{anchor}">'
    f'{html.escape(text)}</text>'
  )


def line(*points: tuple[float, float]) -> str:
  """Returns a line through points."""
  path = ' '.join(f'{x},{y}' for x, y in points)
  return f'<polyline class="line" points="{path}"/>'


def svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
  """Returns a figure; `title` is what a screen reader says."""
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    f'width="{width}" height="{height}" role="img">',
    f'<title>{html.escape(title)}</title><style>{_STYLE}</style>',
    f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" '
    f'height="{height - 1}" rx="10"/>',
    *parts,
    '</svg>',
  ]
  return '\n'.join(lines) + '\n'


def _row(y: float, label: str, cells: Sequence[tuple[str, str]]) -> list[str]:
  """A label and a box for each kind and text."""
  parts = [note(16, y + 19, label)]
  for i, (kind, text) in enumerate(cells):
    if text:
      parts.append(box(150 + 64 * i, y, 56, kind, text))
  return parts


def step() -> str:
  """A chain that is rejected, and one that stands."""
  old, root = ('box', 't0'), ('new', 't1')
  parts = [
    *_row(
      18, 'draft proposes', [('', ''), root, ('sent', 't2'), ('sent', 't4')]
    ),
    *_row(56, 'target chooses', [('', ''), ('good', 't3')]),
    *_row(
      94, 'cache afterwards', [old, root, ('box', 'free'), ('box', 'free')]
    ),
    line((16, 138), (544, 138)),
    *_row(
      154, 'draft proposes', [('', ''), root, ('sent', 't3'), ('sent', 't6')]
    ),
    *_row(
      192,
      'target chooses',
      [('', ''), ('good', 't3'), ('good', 't6'), ('good', 't9')],
    ),
    *_row(230, 'cache afterwards', [old, root, ('good', 't3'), ('good', 't6')]),
    note(420, 75, 'one token: t3'),
    note(420, 211, 'three tokens'),
  ]
  return svg(
    'A step with two drafts: one rejected, one accepted', 560, 276, parts
  )


_TREE = {  # label: column, y, parent and log-probability
  't1': (0, 92, None, '0'),
  't2': (1, 32, 't1', '-0.75'),
  't3': (1, 152, 't1', '-1'),
  't4': (2, 32, 't2', '-3.25'),
  't5': (2, 112, 't3', '-2'),
  't6': (2, 192, 't3', '-2.25'),
  't7': (3, 112, 't5', '-2.5'),
  't9': (3, 192, 't6', '-2.5'),
  't10': (4, 192, 't9', '-2.75'),
}


def tree() -> str:
  """The tree while the target verifies four of its nodes."""
  parts = []
  for column, y, parent, _ in _TREE.values():
    if parent:
      start_column, start = _TREE[parent][:2]
      x = 24 + 110 * start_column + 56
      parts.append(line((x, start + 14), (24 + 110 * column, y + 14)))
  for label, (column, y, _, weight) in _TREE.items():
    kind = 'sent' if label in ('t1', 't2', 't3', 't5') else 'box'
    kind = 'good' if label in ('t6', 't9', 't10') else kind
    parts.append(box(24 + 110 * column, y, 56, kind, label))
    parts.append(note(52 + 110 * column, y + 42, weight, 'middle'))
  parts += [
    box(24, 252, 56, 'sent', 'sent'),
    note(88, 271, 'to the target'),
    box(200, 252, 56, 'good', 'kept'),
    note(264, 271, 'after the verdict t3, t6: t6 is the new root'),
  ]
  return svg('The token tree of the example', 560, 296, parts)


def rounds() -> str:
  """Two asynchronous rounds: a hit, then a miss."""
  parts = [
    *(note(16, y + 19, name) for name, y in (('target', 30), ('draft', 90))),
    box(80, 30, 190, 'sent', 'verify t1 t2 t3 t5'),
    box(80, 90, 176, 'good', 'grow: t5 t6, t7 t9, t10'),
    box(274, 90, 40, 'new', 'hit'),
    box(322, 30, 190, 'sent', 'verify t6 t9 t10 t11'),
    box(322, 90, 176, 'good', 'grow: t11, t13, t14'),
    box(516, 90, 100, 'bad', 'miss: restart'),
    box(624, 30, 120, 'sent', 'verify t16 ...'),
    line((270, 44), (278, 88)),
    line((314, 88), (322, 60)),
    line((512, 44), (520, 88)),
    line((616, 88), (626, 60)),
    note(250, 76, 't3 t6', 'end'),
    note(492, 76, 't9 t16', 'end'),
    note(16, 146, 'Verdicts go down, proposals go up. After a hit the next '
         'part of the tree is there; a miss costs forwards of the draft.'),
  ]  # fmt: skip
  return svg('Two asynchronous rounds of the example', 760, 164, parts)


def goodput() -> str:
  """Tokens a second by the nodes that are verified, alone and under load."""
  gains = (1.0, 1.472, 1.840, 1.975, 2.081)
  parts = []
  for i, gain in enumerate(gains):
    for k, (per_token, kind) in enumerate(((1, 'sent'), (5, 'new'))):
      rate = gain / (10 + per_token * i) * 1e3
      height = rate * 0.9
      x = 60 + 96 * i + 40 * k
      parts.append(note(x + 18, 184 - height, f'{rate:.0f}', 'middle'))
      parts.append(
        f'<rect class="{kind}" x="{x}" y="{190 - height:.1f}" width="36" '
        f'height="{height:.1f}"/>'
      )
    parts.append(
      note(98 + 96 * i, 208, f'{i + 1} {"nodes" if i else "node"}', 'middle')
    )
  parts += [
    line((50, 190), (536, 190)),
    box(60, 222, 56, 'sent', 'alone'),
    note(124, 241, '1 ms a token more'),
    box(280, 222, 56, 'new', 'full'),
    note(344, 241, '5 ms a token more'),
  ]
  return svg('Tokens a second for 1 to 5 nodes of the tree', 560, 266, parts)


def kernels() -> str:
  """What each node of the example sees in the cache."""
  nodes = ('t1', 't2', 't3', 't5')
  seen = ((0,), (0, 1), (0, 2), (0, 2, 3))
  parts = [note(80, 28, 'prefix: seen by all, no mask')]
  for j, name in enumerate(nodes):
    parts.append(note(356 + 48 * j, 28, name, 'middle'))
  for i, name in enumerate(nodes):
    y = 38 + 34 * i
    parts.append(note(24, y + 19, name))
    parts.append(box(60, y, 260, 'box', ''))
    for j in range(len(nodes)):
      kind = 'sent' if j in seen[i] else 'box'
      parts.append(
        box(334 + 48 * j, y, 44, kind, 'sees' if j in seen[i] else '')
      )
  parts.append(
    note(24, 194, 'A query reads its prefix, its ancestors and itself.')
  )
  return svg('The ancestor mask of the example', 560, 210, parts)


def serving() -> str:
  """A step of the engine with three requests."""
  parts = [
    note(16, 38, 'one step, one flat list of tokens'),
    *(
      box(16 + 62 * i, 50, 56, kind, label)
      for i, (kind, label) in enumerate(
        [
          ('new', 't1'), ('sent', 't2'), ('sent', 't3'), ('sent', 't5'),
          ('new', 'b7'), ('good', 'c0'), ('good', 'c1'), ('good', 'c2'),
        ]
      )
    ),
    note(16, 98, 'row A: root and drafts'),
    note(264, 98, 'row B'),
    note(326, 98, 'row C: a chunk of a prompt'),
    *(box(16 + 124 * i, 124, 116, 'box', f'page {n}') for i, n in
      enumerate((4, 0, 2, 7))),
    note(16, 172, 'of A'), note(140, 172, 'of A'), note(264, 172, 'of B'),
    note(388, 172, 'of C'),
  ]  # fmt: skip
  return svg('A step of the serving engine', 560, 190, parts)


FIGURES = {
  'step': step,
  'tree': tree,
  'rounds': rounds,
  'goodput': goodput,
  'kernels': kernels,
  'serving': serving,
}

if __name__ == '__main__':
  program.run(main)
