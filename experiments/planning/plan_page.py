"""Plans as one HTML page that needs nothing else, and their picture."""

from collections.abc import Mapping, Sequence

from experiments.output import report_page, result_folder
from experiments.output.result_folder import Row
from experiments.planning import plan_report
from swiftspec_jax.cli import plots

# Of the parts of a round: the target's are blue, the draft's orange.
_PARTS = {
  'target: weights': '#00406b',
  'target: kv': '#00558c',
  'target: compute': '#00406b',
  'target: all_reduces': '#4f9fd1',
  'target: launches': '#a8d1ec',
  'draft: weights': '#a05a00',
  'draft: kv': '#c47500',
  'draft: compute': '#a05a00',
  'draft: all_reduces': '#eba83a',
  'draft: launches': '#f7d79b',
  'handoff': plots.GREY,
}
_INTERVAL = (
  'Dots are predictions, lines intervals of 95 %; blue has the kernels of this '
  'project. Diamonds are published with int4 weights, the dashed line is the '
  'goal. On the right is what a mean round is spent on; draft forwards beside '
  'a longer verification take no time.'
)


def render(
  summary: Row, tables: Mapping[str, Sequence[Row]], picture: bytes
) -> str:
  """Returns the page.

  Args:
    summary: values of summary.json.
    tables: lines of the files, by name.
    picture: PNG of `draw`.
  """
  wanted = summary['goal']['tokens_per_second'] or 0
  advice = plan_report.advice(summary, tables)
  parts = [
    report_page.element(
      'p',
      'Predicted, but for what is called measured. docs/how_to/plan.md says '
      'how far to trust it.',
    ),
    report_page.element('pre', advice),
    report_page.image('speeds and parts of a round', picture),
    report_page.element('p', _INTERVAL),
  ]
  drafts = [
    {'draft': name, **draft} for name, draft in summary['drafts'].items()
  ]
  left_out = [{'left out': reason} for reason in summary['left_out']]
  for title, rows in (
    ('Best plan of each mode, split and kernels', map(_shown, tables['rows'])),
    (f'What would reach {wanted:g} tokens/s alone', tables['needs']),
    ('Numbers of the chip', tables['constants']),
    ('Acceptance of the drafts', drafts),
    ('Left out', left_out),
    ('Predicted beside published and measured', tables['validation']),
  ):
    if rows := list(rows):
      parts += [report_page.element('h2', title), report_page.table(rows)]
  facts = report_page.facts(result_folder.flat(summary['provenance']))
  parts += [
    report_page.details('All choices, with the best sizes', tables['search']),
    report_page.details('Rounds that were run', tables['rounds']),
    report_page.details('Provenance', facts),
  ]
  return report_page.page(summary['deployment'], parts)


def _shown(row: Row) -> Row:
  """Returns what the page has of a line of rows.jsonl."""
  return {
    'mode': row['mode'],
    'chips': row['chips'],
    'kernels': 'yes' if row['kernels'] else 'no',
    'target': row['weight_dtype'],
    'draft': f'{row["draft"]} {row["draft_weight_dtype"]}',
    'nodes': row['num_nodes'],
    'draft forwards': row['num_draft_steps'],
    'tokens a round': row['acceptance_length'],
    'target ms': 1e3 * row['target_step_seconds'],
    'draft ms': 1e3 * row['draft_step_seconds'],
    'measured': row['measured'],
    'tokens/s': row['tokens_per_second'],
    'slow': row['slow_tokens_per_second'],
    'from (95 %)': row['low'],
    'to': row['high'],
    'published': row['published'],
    'limit': row['limit'],
  }


def draw(rows: Sequence[Row], goal: float | None) -> bytes:
  """Returns a PNG of rows.jsonl: speeds with intervals, and parts of rounds."""
  figure, (speeds, rounds) = plots.make_figure(
    13, 1.6 + 0.3 * len(rows), 2, sharey=True
  )
  for place, row in enumerate(rows):
    color = plots.BLUE if row['kernels'] else plots.GREY
    speeds.plot([row['low'], row['high']], [place] * 2, color=color)
    speeds.plot(row['tokens_per_second'], place, 'o', color=color)
    if row['published'] is not None:
      speeds.plot(row['published'], place, 'D', color=plots.ORANGE)
    left = 0.0
    for name in _PARTS:
      length = 1e3 * row['parts'].get(name, 0.0)
      rounds.barh(place, length, 0.7, left, color=_PARTS[name])
      left += length
    tokens = f' {row["acceptance_length"]:.2f} tokens'
    rounds.text(left, place, tokens, va='center', fontsize='small')
  if goal is not None:
    speeds.axvline(goal, color=plots.ORANGE, linestyle='--')
  names = [row['plan'] for row in rows]
  speeds.set_yticks(range(len(rows)), names)
  speeds.invert_yaxis()
  speeds.set_xlim(left=0)
  speeds.set_xlabel('tokens a second')
  rounds.set_xlabel('milliseconds of a round')
  rounds.margins(x=0.2)
  used = [name for name in _PARTS if any(name in row['parts'] for row in rows)]
  handles = [rounds.barh(0, 0, color=_PARTS[name]) for name in used]
  figure.legend(
    handles, used, loc='outside lower right', ncols=5, frameon=False
  )
  return plots.png(figure)
