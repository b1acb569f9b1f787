"""Trees of some rounds as one HTML page that needs nothing else."""

import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import markupsafe

import swiftspec_jax as ss
from experiments.output import report_page
from experiments.pictures.tree_rounds import Node, Round
from swiftspec_jax import tree as tree_lib

OUTCOMES = {
  tree_lib.HIT: 'hit',
  tree_lib.LATE_HIT: 'late hit',
  tree_lib.MISS: 'miss',
}
_LEGEND = {  # by classes
  'root sent': 'last known token, the root',
  'accepted sent': 'sent and accepted',
  'sent dropped': 'sent, not accepted',
  'next': "the target's next token: the next root",
  'missed': 'the same, but not in the tree',
  'halo': 'kept for the next round',
  'dropped': 'dropped after the verdict',
  '': 'solid: expanded, has keys and values',
  'candidate': 'dashed: candidate, has a weight only',
}
_MINUS = '\N{MINUS SIGN}'
_MAX_CHARS = 16  # of a token that is drawn
_VISIBLE = {' ': '␣', '\n': '↵', '\t': '⇥'}


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
  page = importlib.resources.files('swiftspec_jax.server').joinpath('page')
  return report_page.TEMPLATES.get_template('trees.html').render(
    title='Draft trees',
    facts={_words(name): _words(value) for name, value in facts.items()},
    totals=_totals(rounds),
    legend=_LEGEND,
    rounds=[_section(round_, max_nodes) for round_ in rounds],
    drawing=markupsafe.Markup(page.joinpath('drawing.js').read_text()),
  )


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
    'leaves of a draft forward': str(tree_config.num_leaves),
    'draft forwards of a round': str(tree_config.num_draft_steps),
    **({} if forced is None else {'forced acceptance': f'{forced:g}'}),
  }


def visible(text: str) -> str:
  """Returns the text with white space and control characters spelled out."""
  return ''.join(
    _VISIBLE.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text
  )


def _words(text: str) -> str:
  """Returns text of which only what cannot be printed is spelled out."""
  return ' '.join(map(visible, text.split(' ')))


def _totals(rounds: Sequence[Round]) -> dict[str, Any]:
  num_tokens = sum(len(r.emitted) for r in rounds)
  outcomes = [r.outcome for r in rounds]
  return {
    'rounds': len(rounds),
    'tokens': f'{num_tokens} ({num_tokens / max(len(rounds), 1):.2f} a round)',
    'hits': outcomes.count(tree_lib.HIT),
    'late hits': outcomes.count(tree_lib.LATE_HIT),
    'misses': outcomes.count(tree_lib.MISS),
  }


def _section(round_: Round, max_nodes: int) -> dict[str, Any]:
  """Returns what the template shows of a round."""
  nodes = round_.nodes
  boxes = boxes_of(round_, max_nodes)
  is_miss = round_.outcome == tree_lib.MISS
  *accepted, last = map(visible, round_.emitted)
  num_kept = sum(node.is_kept for node in nodes)
  return {
    'outcome': OUTCOMES[round_.outcome],
    'consequence': {
      tree_lib.HIT: f'{num_kept} of {len(nodes)} nodes are kept',
      tree_lib.LATE_HIT: 'the next root has no children yet: a new tree',
      tree_lib.MISS: 'the next token is not in the tree: a new tree',
    }[round_.outcome],
    'figures': {
      'position of the root': round_.position,
      'nodes of the tree': len(nodes),
      'expanded': sum(node.is_expanded for node in nodes),
      'sent': sum(node.is_sent for node in nodes),
      'accepted': len(accepted),
      'draft forwards that the target waited for': round_.num_forwards,
      'not drawn': len(nodes) - len(boxes) + is_miss,
    },
    'context': visible(round_.context),
    'accepted': accepted,
    'next': last,
    'boxes': json.dumps(boxes),
  }


def boxes_of(round_: Round, max_nodes: int) -> list[dict[str, Any]]:
  """Returns what `drawing.js` draws: nodes, and the next token if missed.

  Nodes that were sent and those on the path of the verdict always are among
  them, then the most probable ones, up to `max_nodes`; with a node, its parent
  is, too.
  """
  nodes = round_.nodes
  # No child is more probable than its parent, nor does it stand before it.
  order = sorted(
    range(len(nodes)),
    key=lambda i: (not _is_always_drawn(nodes[i]), -nodes[i].log_prob, i),
  )
  num_drawn = max(max_nodes, sum(map(_is_always_drawn, nodes)))
  chosen = sorted(order[:num_drawn])
  places = {node: place for place, node in enumerate(chosen)}
  boxes = [_box(nodes, i) | {'parent': places.get(nodes[i].parent)}
           for i in chosen]  # fmt: skip
  if round_.outcome == tree_lib.MISS:
    path = [i for i in chosen if nodes[i].is_accepted]
    last = max(path, key=lambda i: nodes[i].depth, default=0)
    missed = {
      'name': _short(round_.emitted[-1]),
      'weight': 'not in the tree',
      'about': 'the next token, which is not in the tree',
      'classes': 'missed',
      'parent': places[last],
      'prob': 0,
      'share': 0.3,
      'isPassed': True,
      'isKept': False,
    }
    boxes.append(missed)
  return boxes


def _is_always_drawn(node: Node) -> bool:
  is_root = node.parent is None
  return is_root or node.is_sent or node.is_accepted or node.is_next


def _box(nodes: Sequence[Node], i: int) -> dict[str, Any]:
  node = nodes[i]
  is_root = node.parent is None
  above = 0.0 if is_root else nodes[node.parent].log_prob
  share, prob = math.exp(node.log_prob - above), math.exp(node.log_prob)
  sign = _MINUS if node.log_prob < 0 else ''
  log = f'{sign}{abs(node.log_prob):.2f}'
  about = {
    f'{visible(node.text)} (token {node.token_id}), depth {node.depth}': True,
    f'probability after its parent {_percent(share)}': True,
    f'weight {_percent(prob)}, its logarithm {log}': True,
    'expanded': node.is_expanded,
    'candidate': not node.is_expanded,
    'the root': is_root,
    'sent': node.is_sent,
    'accepted': node.is_accepted,
    'the next token': node.is_next,
    'kept for the next round': node.is_kept,
  }
  classes = {
    'root': is_root,
    'candidate': not node.is_expanded,
    'sent': node.is_sent,
    'accepted': node.is_accepted,
    'next': node.is_next,
    'dropped': not (is_root or node.is_accepted or node.is_kept),
  }
  return {
    'name': _short(node.text),
    'weight': f'{_percent(prob)} · {log}',
    'about': '\n'.join(line for line, holds in about.items() if holds),
    'classes': ' '.join(name for name, holds in classes.items() if holds),
    'prob': prob,
    'share': share,
    'isPassed': node.is_accepted or node.is_next,
    'isKept': node.is_kept,
  }


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
