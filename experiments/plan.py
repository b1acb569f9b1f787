r"""Plans how fast a pair will decode on chips that one has not rented.

  python -m experiments.plan --config=configs/llama3_70b_3b_8xh200.py \
    --output_dir=results

Runs the real tree pipeline on this CPU with a draft whose acceptance is forced.
Predicted times of the forwards give its rounds a price: for each split of the
chips, serial and asynchronous, with the kernels of this project and without.
How many kernels a program starts is counted, see configs/launches.py. Nothing
is measured on the chips. The directory gets rows.jsonl (the best sizes of each
plan), search.jsonl (all sizes), rounds.jsonl, validation.jsonl (predictions
beside published figures), summary.json, speed.png and report.html. The best
plan is in config.json, which tune, serve and the others take as --config.
"""

import dataclasses
import json
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
from experiments import program
from experiments.output import (
  benchmark_output,
  configuration,
  provenance,
  report_page,
  result_folder,
)
from experiments.planning import (
  plan_report,
  plan_rounds,
  plan_search,
  plan_validation,
)

_CONFIG = flags.DEFINE_string(
  'config', None, 'Python file with a CONFIG, see configs/.', required=True
)
_FORCED_ACCEPTANCE = flags.DEFINE_float(
  'forced_acceptance',
  None,
  "Probability that the draft's best child is right. Default: the config's.",
)
_NUM_REQUESTS = flags.DEFINE_integer(
  'num_requests', 24, 'Requests to run on this CPU.', lower_bound=2
)
_OUTPUT_DIR = flags.DEFINE_string(
  'output_dir', None, 'New or empty directory for the results.', required=True
)


def main() -> None:
  """Runs the program."""
  deployment = _read(pathlib.Path(_CONFIG.value))
  directory = pathlib.Path(_OUTPUT_DIR.value)
  benchmark_output.open_directory(directory, {}, resume=False)
  # Rounds need a device for the target and one for the draft, and no more.
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 2)
  points = plan_validation.points()
  constants = plan_validation.fit([p for p in points if p.is_fitted])
  validation = plan_validation.validate(points)
  recordings = _record(deployment)
  found, left_out = plan_search.plans(deployment, recordings)
  as_published, _ = plan_search.plans(
    deployment, recordings, launches.published
  )
  validation += plan_report.compare(deployment, as_published)
  ratios = _ratios(validation)
  rows = [
    plan_search.row(plan, deployment, ratios)
    for plan in plan_search.best_of_groups(found)
  ]
  summary = {
    'deployment': deployment.name,
    'acceptance': deployment.acceptance,
    'goal': deployment.goal,
    'fitted': dataclasses.asdict(constants),
    'best': max(rows, key=lambda row: row['tokens_per_second']),
    'left_out': left_out,
    'what_if': plan_search.what_ifs(deployment, recordings),
    'provenance': provenance.collect(),
  }
  tables = {
    'rows': rows,
    'validation': validation,
    'search': [plan_search.row(plan, deployment) for plan in found],
    'rounds': [recording.to_json() for recording in recordings],
  }
  _write(directory, tables, summary, plan_report.draw(rows, deployment))
  print(plan_report.validation_table(validation))
  print(f'\n{deployment.name}, acceptance {deployment.acceptance:g}')
  print(plan_report.table(rows))
  for reason in left_out:
    print(f'left out: {reason}')
  print(f'\n{_advice(summary, rows)}\nwritten to {directory}')


def _read(path: pathlib.Path) -> Deployment:
  """Returns the deployment of a config file, with the flags' changes."""
  found = deployment_lib.read(path)
  if _FORCED_ACCEPTANCE.value is None:
    return found
  return dataclasses.replace(found, acceptance=_FORCED_ACCEPTANCE.value)


def _record(deployment: Deployment) -> list[plan_rounds.Recording]:
  trees = [
    ss.TreeConfig(
      num_nodes=num_nodes,
      width=deployment.width,
      num_draft_steps=num_draft_steps,
      forced_acceptance=deployment.acceptance,
      prompt_lookup=False,
    )
    for num_nodes in deployment.num_nodes
    for num_draft_steps in deployment.num_draft_steps
  ]
  recordings = plan_rounds.record(trees, _NUM_REQUESTS.value)
  return list(
    tqdm.tqdm(recordings, desc='rounds', total=2 * len(trees), mininterval=0.5)
  )


def _ratios(
  validation: Sequence[Mapping[str, Any]],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns published over predicted step times: of targets, of drafts.

  Predictions are those of constants that were fitted without the point.
  """
  steps = [row for row in validation if 'is_draft' in row]
  return tuple(
    np.array([1 / (1 + row['left_out_error']) for row in steps if keep(row)])
    for keep in (lambda r: not r['is_draft'], lambda r: r['is_draft'])
  )


def _write(directory, tables, summary, picture) -> None:
  for name, lines in tables.items():
    text = ''.join(f'{json.dumps(line)}\n' for line in lines)
    benchmark_output.write(directory / f'{name}.jsonl', text.encode())
  benchmark_output.write_json(directory / 'summary.json', summary)
  best = summary['best']
  configuration.write(
    directory / 'config.json',
    plan_search.flags_of(best),
    [best],
    device_kind=None,
  )
  benchmark_output.write_pictures(directory, {'speed': picture})
  page = report_page.render([result_folder.read(directory)])
  benchmark_output.write(directory / 'report.html', page.encode())


def _advice(
  summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
  """Returns what the best plan is, what holds it back, and what was fitted."""
  best, fitted, goal = summary['best'], summary['fitted'], summary['goal']
  lines = [
    f'best: {_name(best)}, {best["tokens_per_second"]:.0f} tokens/s '
    f'({best["low"]:.0f} to {best["high"]:.0f}); limit: {best["limit"]}'
  ]
  if goal is not None:
    above = [row for row in rows if row['tokens_per_second'] > goal]
    names = [f'{_name(r)} ({r["tokens_per_second"]:.0f})' for r in above]
    lines.append(f'above the goal of {goal:g}: {", ".join(names) or "none"}')
    if above:
      sure = [_name(row) for row in above if row['low'] > goal]
      lines.append(f'with the whole interval: {", ".join(sure) or "none"}')
  lines += [
    f'  with {change}: {speed:.0f}'
    for change, speed in summary['what_if'].items()
  ]
  lines.append(
    f'three fitted constants: {1e6 * fitted["launch_seconds"]:.2f} us a '
    f'launch; of the bandwidth {fitted["efficiency"]["wide"]:.3f} for '
    f'bfloat16, {fitted["efficiency"]["quantized"]:.3f} for integers'
  )
  return '\n'.join(lines)


def _name(row: Mapping[str, Any]) -> str:
  """Returns a plan in a few words."""
  kernels = 'kernels' if row['kernels'] else 'no kernels'
  chips = f'{row["target_chips"]}'
  if row['mode'] == 'async':
    chips += f'+{row["draft_chips"]}'
  return f'{row["weight_dtype"]} {row["mode"]} {chips} {kernels}'


if __name__ == '__main__':
  program.run(main)
