"""Trees of some rounds as one HTML page that needs nothing else."""

import html
from collections.abc import Mapping, Sequence

import swiftspec_jax as ss
from experiments.pictures import tree_layout, tree_picture
from experiments.pictures.tree_rounds import Round
from swiftspec_jax import tree as tree_lib

OUTCOMES = {
  tree_lib.HIT: 'hit',
  tree_lib.LATE_HIT: 'late hit',
  tree_lib.MISS: 'miss',
}

# All rules are for .trees alone, so that a notebook can show the page.
_STYLE = """
.trees { background: #fff; color: #1f2937; padding: 20px 24px; line-height: 1.5;
  font: 14px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
.trees h1 { font-size: 22px; margin: 0 0 4px; color: inherit; }
.trees h2 { font-size: 17px; margin: 0; color: inherit; }
.trees p { margin: 4px 0; max-width: 150ch; }
.trees code, .trees .token, .trees svg .name { font-family: ui-monospace,
  SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
.trees .facts { color: #64748b; }
.trees .facts b { color: #1f2937; font-weight: 600; }
.trees section { border: 1px solid #e2e8f0; border-radius: 10px;
  margin: 16px 0; overflow: hidden; }
.trees header { background: #f8fafc; border-bottom: 1px solid #e2e8f0;
  padding: 10px 14px; }
.trees .line { display: flex; gap: 10px; align-items: baseline;
  flex-wrap: wrap; }
.trees .pill { border-radius: 99px; padding: 1px 10px; font-weight: 600;
  font-size: 13px; }
.trees .pill.hit { background: #fde68a; color: #78350f; }
.trees .pill.late.hit { background: #fff; color: #92400e;
  outline: 1.5px dashed #d97706; }
.trees .pill.miss { background: #fee2e2; color: #b91c1c; }
.trees .text { margin-top: 6px; }
.trees .token { font-size: 13px; white-space: pre-wrap; color: #64748b; }
.trees .token.accepted, .trees .token.next { border-radius: 4px;
  padding: 0 3px; margin-left: 2px; }
.trees .token.accepted { background: #15803d; color: #fff; }
.trees .token.next { background: #fbbf24; color: #451a03; }
.trees .token.next.miss { background: #fee2e2; color: #b91c1c;
  outline: 1.5px dashed #dc2626; }
.trees .scroll { overflow-x: auto; padding: 4px 8px; }
.trees svg { display: block; }
.trees .legend { display: flex; flex-wrap: wrap; gap: 4px 18px;
  margin-top: 12px; color: #475569; font-size: 13px; }
.trees .legend span { display: flex; align-items: center; gap: 6px; }
"""


def render(
  rounds: Sequence[Round], facts: Mapping[str, str], max_nodes: int = 60
) -> str:
  """Returns the page; it is well-formed XML, too.

  Args:
    rounds: rounds to be drawn, in order.
    facts: name and value of what the reader has to know about the run.
    max_nodes: drawn of each tree, the most probable ones. Nodes that were sent
      and the next token always are.
  """
  lines = [
    '<!DOCTYPE html>',
    '<html lang="en"><head><meta charset="utf-8" />',
    '<meta name="viewport" content="width=device-width" />',
    f'<title>Draft trees</title><style>{_STYLE}{tree_picture.STYLE}</style>',
    '</head>',
    '<body style="margin: 0"><div class="trees">',
    '<h1>Draft trees, round by round</h1>',
    _facts(facts),
    _facts(_totals(rounds)),
    _legend(),
    *(_section(i, r, max_nodes) for i, r in enumerate(rounds, start=1)),
    '</div></body></html>',
  ]
  return '\n'.join(lines)


def facts(
  target: ss.Model, draft: ss.Model, tree_config: ss.TreeConfig, prompt: str
) -> dict[str, str]:
  """Returns what the reader has to know about a run."""
  mode = 'serial' if draft.mesh == target.mesh else 'asynchronous'
  forced = tree_config.forced_acceptance
  return {
    'prompt': prompt,
    'target': target.name,
    'draft': draft.name,
    'mode': mode,
    'nodes to verify': str(tree_config.num_nodes),
    'leaves of a draft forward': str(tree_config.width),
    'draft forwards of a round': str(tree_config.num_draft_steps),
    **({} if forced is None else {'forced acceptance': f'{forced:g}'}),
  }


def _facts(facts: Mapping[str, str]) -> str:
  parts = [
    f'{_plain(name)} <b>{_plain(value)}</b>' for name, value in facts.items()
  ]
  return f'<p class="facts">{" · ".join(parts)}</p>'


def _plain(text: str) -> str:
  """Returns text as HTML; only what cannot be printed is spelled out."""
  words = [tree_picture.visible(word) for word in text.split(' ')]
  return html.escape(' '.join(words))


def _totals(rounds: Sequence[Round]) -> dict[str, str]:
  num_tokens = sum(len(r.emitted) for r in rounds)
  outcomes = [r.outcome for r in rounds]
  return {
    'rounds': str(len(rounds)),
    'tokens': f'{num_tokens} ({num_tokens / max(len(rounds), 1):.2f} a round)',
    'hits': str(outcomes.count(tree_lib.HIT)),
    'late hits': str(outcomes.count(tree_lib.LATE_HIT)),
    'misses': str(outcomes.count(tree_lib.MISS)),
  }


def _legend() -> str:
  entries = (
    ('root sent', 'last known token, the root'),
    ('accepted sent', 'sent and accepted'),
    ('sent dropped', 'sent, not accepted'),
    ('next', "the target's next token: the next root"),
    ('missed', 'the same, but not in the tree'),
    ('halo', 'kept for the next round'),
    ('dropped', 'dropped after the verdict'),
    ('', 'solid: expanded, has keys and values'),
    ('candidate', 'dashed: candidate, has a weight only'),
  )
  parts = []
  for classes, meaning in entries:
    halo = ''
    if classes == 'halo':
      classes = ''
      halo = '<rect class="halo" width="38" height="22" rx="6" />'
    parts.append(
      f'<span><svg width="38" height="22" aria-hidden="true">{halo}'
      f'<g class="{classes}"><rect class="box" x="5" y="4" width="28" '
      f'height="14" rx="4" /></g></svg>{meaning}</span>'
    )
  note = (
    '<p class="facts">Under a token stands its weight: the probability of the '
    "path from the root in the draft's eyes, and the logarithm of it. The "
    "verdict's path is drawn first, then the most probable nodes. A thicker "
    'line means more probable after its parent. Point at a node for more.</p>'
  )
  return f'<div class="legend">{"".join(parts)}</div>{note}'


def _section(number: int, round_: Round, max_nodes: int) -> str:
  chosen = tree_layout.choose(round_.nodes, max_nodes)
  return '\n'.join(
    [
      '<section><header>',
      _heading(number, round_),
      _figures(round_, len(chosen)),
      _text(round_),
      '</header><div class="scroll">',
      tree_picture.draw(round_, chosen),
      '</div></section>',
    ]
  )


def _heading(number: int, round_: Round) -> str:
  name = OUTCOMES[round_.outcome]
  nodes = round_.nodes
  num_kept = sum(node.is_kept for node in nodes)
  consequence = {
    tree_lib.HIT: f'{num_kept} of {len(nodes)} nodes are kept',
    tree_lib.LATE_HIT: 'the next root has no children yet: a new tree',
    tree_lib.MISS: 'the next token is not in the tree: a new tree',
  }[round_.outcome]
  return (
    f'<div class="line"><h2>Round {number}</h2>'
    f'<span class="pill {name}">{name}</span>'
    f'<span class="facts">{consequence}</span></div>'
  )


def _figures(round_: Round, num_drawn: int) -> str:
  nodes = round_.nodes
  figures = {
    'position of the root': round_.position,
    'nodes of the tree': len(nodes),
    'expanded': sum(node.is_expanded for node in nodes),
    'sent': sum(node.is_sent for node in nodes),
    'accepted': len(round_.emitted) - 1,
    'draft forwards that the target waited for': round_.num_forwards,
    'not drawn': len(nodes) - num_drawn,
  }
  return _facts({name: str(value) for name, value in figures.items()})


def _text(round_: Round) -> str:
  """Returns the end of the text, with the new tokens marked."""
  classes = ['token accepted'] * (len(round_.emitted) - 1)
  classes = [*classes, f'token next {OUTCOMES[round_.outcome]}']
  spans = [
    f'<span class="{css}">{html.escape(tree_picture.visible(text))}</span>'
    for css, text in zip(classes, round_.emitted, strict=True)
  ]
  before = html.escape(tree_picture.visible(round_.context))
  return (
    f'<div class="text"><span class="token">…{before}</span>'
    f'{"".join(spans)}</div>'
  )
