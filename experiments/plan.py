r"""Plans how fast models will decode on chips that one has not rented.

  python -m experiments.plan --config=configs/llama3_70b_3b_8xh200.py \
    --output_dir=results
  python -m experiments.plan --config=CONFIG.py --measured=REPORT \
    --goal=latency --output_dir=results

Runs the real tree pipeline on this CPU with drafts whose acceptance is forced.
Predicted times of the forwards give its rounds a price: for each split of the
chips, serial and asynchronous, with the kernels of this project and without,
each draft, and each dtype of target and draft. How many kernels a program
starts is counted, see configs/launches.py. --measured names the folder of
`experiments.accelerator_report` on one such chip; without it nothing is
measured.

The directory gets rows.jsonl, the best plan of each mode, split and kernels;
search.jsonl, the best sizes of all choices; and rounds.jsonl. validation.jsonl
has predictions beside published and measured figures, constants.jsonl the
numbers of the chip and their sources, needs.jsonl what would reach the config's
goal. summary.json, speed.png and report.html have the rest. The best plan is in
config.json, which tune, serve and the others take as --config.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from absl import flags

import swiftspec_jax as ss
from configs import deployment as deployment_lib
from configs import launches
from configs.deployment import Deployment
from experiments.flags import run_flags
from experiments.planning import (
  plan_changes,
  plan_measured,
  plan_page,
  plan_report,
  plan_rounds,
  plan_search,
  plan_validation,
)
from experiments.planning.plan_search import GOALS
from swiftspec_jax.cli import configuration, output_files, program, provenance

_CONFIG = flags.DEFINE_string(
  'config', None, 'Python file with a CONFIG, see configs/.', required=True
)
_GOAL = flags.DEFINE_enum(
  'goal',
  'throughput',
  list(GOALS),
  'What the best plan is chosen by: tokens a second of all requests, one after '
  'the other, or the speed that 95 % of them reach.',
)
_MEASURED = flags.DEFINE_string(
  'measured',
  None,
  'Directory of experiments.accelerator_report, made on one such chip. '
  'Default: data sheets and published step times.',
)
_FORCED_ACCEPTANCE = flags.DEFINE_float(
  'forced_acceptance',
  None,
  "Probability that a draft's best child is right. Default: the config's.",
)
_NUM_REQUESTS = flags.DEFINE_integer(
  'num_requests', 24, 'Requests to run on this CPU.', lower_bound=2
)
_OUTPUT_DIR = run_flags.output_dir()


def main() -> None:
  """Runs the program."""
  deployment = _read(pathlib.Path(_CONFIG.value))
  timed = []
  if _MEASURED.value is not None:
    deployment, timed = plan_measured.apply(
      deployment, pathlib.Path(_MEASURED.value)
    )
  directory = pathlib.Path(_OUTPUT_DIR.value)
  output_files.open_directory(directory)
  # Rounds need a device for the target and one for the draft, and no more.
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 2)
  validation = plan_validation.validate(plan_validation.points())
  if timed:
    validation += plan_validation.validate(timed)
  ratios = _ratios(validation)
  recordings = _record(deployment)
  validation += _compare(deployment, recordings)
  goal = _GOAL.value
  found, left_out = plan_search.plans(deployment, recordings)
  chosen = plan_search.best(found, goal)
  rows = sorted(
    (
      plan_report.row(plan, deployment, ratios)
      for plan in plan_search.best_of(found, goal, lambda c: c.group)
    ),
    key=lambda row: -row[GOALS[goal]],
  )
  summary = {
    'deployment': deployment.name,
    'drafts': {
      draft.name: {'acceptance': draft.acceptance, 'source': draft.source}
      for draft in deployment.drafts
    },
    'goal': {'tokens_per_second': deployment.goal, 'of': goal},
    'measured': _MEASURED.value,
    'best': rows[0],
    'left_out': left_out,
    'what_if': plan_changes.what_ifs(deployment, recordings, goal),
    'provenance': provenance.collect(),
  }
  tables = {
    'rows': rows,
    'needs': plan_changes.needs(deployment, recordings, chosen, goal),
    'constants': plan_measured.constants(deployment.chip),
    'validation': validation,
    'search': [
      plan_report.row(plan, deployment)
      for plan in plan_search.best_of(found, goal, lambda c: c)
    ],
    'rounds': [recording.to_json() for recording in recordings],
  }
  _write(directory, tables, summary, plan_page.draw(rows, deployment.goal))
  print(plan_report.validation_table(validation))
  print(f'\n{deployment.name}')
  print(plan_report.table(rows))
  for reason in left_out:
    print(f'left out: {reason}')
  print(f'\n{plan_report.advice(summary, tables)}\n')
  print(plan_report.sources(tables['constants']))
  print(f'written to {directory}')


def _read(path: pathlib.Path) -> Deployment:
  """Returns the deployment of a config file, with the flags' changes."""
  found = deployment_lib.read(path)
  if _FORCED_ACCEPTANCE.value is None:
    return found
  return dataclasses.replace(
    found,
    drafts=tuple(
      dataclasses.replace(
        draft,
        acceptance=_FORCED_ACCEPTANCE.value,
        source='--forced_acceptance',
      )
      for draft in found.drafts
    ),
  )


def _record(deployment: Deployment) -> list[plan_rounds.Recording]:
  trees = [
    ss.TreeConfig(
      num_nodes=num_nodes,
      width=deployment.width,
      num_draft_steps=num_draft_steps,
      forced_acceptance=acceptance,
      prompt_lookup=False,
    )
    for acceptance in dict.fromkeys(d.acceptance for d in deployment.drafts)
    for num_nodes in deployment.num_nodes
    for num_draft_steps in deployment.num_draft_steps
  ]
  recordings = plan_rounds.record(trees, _NUM_REQUESTS.value)
  return list(
    tqdm.tqdm(recordings, desc='rounds', total=2 * len(trees), mininterval=0.5)
  )


def _compare(deployment: Deployment, recordings) -> list[dict[str, Any]]:
  """Returns the rows of validation.jsonl with published speeds."""
  if not deployment.published:
    return []
  paper = dataclasses.replace(
    deployment, weight_dtypes=('int4',), drafts=deployment.drafts[:1]
  )
  found, _ = plan_search.plans(paper, recordings, launches.published)
  return plan_report.compare(paper, found)


def _ratios(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
  """Returns published over predicted step times: of targets, of drafts.

  Predictions are those of constants that were fitted without the point.
  """
  ratios = 1 / (1 + np.array([row['left_out_error'] for row in rows]))
  is_draft = np.array([row['is_draft'] for row in rows])
  return ratios[~is_draft], ratios[is_draft]


def _write(directory, tables, summary, picture) -> None:
  for name, lines in tables.items():
    output_files.write_lines(directory / f'{name}.jsonl', lines)
  output_files.write_json(directory / 'summary.json', summary)
  best = summary['best']
  configuration.write(
    directory / 'config.json',
    plan_report.flags_of(best),
    [best],
    device_kind=None,
  )
  output_files.write_pictures(directory, {'speed': picture})
  page = plan_page.render(summary, tables, picture)
  output_files.write(directory / 'report.html', page.encode())


if __name__ == '__main__':
  program.run(main)
