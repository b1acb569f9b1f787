"""The serving engine: what its steps cost, and latency under load."""

import functools
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from experiments.accelerator import weights
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from swiftspec_jax import errors, testing
from swiftspec_jax.cli import output_files
from swiftspec_jax.policies.cost_model import storage
from swiftspec_jax.policies.cost_model.measured import MeasuredCosts

_ROOT = pathlib.Path(__file__).parents[3]
_COSTS = 'costs.json'
_ACCEPTANCE = 0.7
# Of the engine.
_ENGINE = (
  '--rows=1,4,16,64',
  '--query_tokens=64,320',
  '--contexts=1024',
  '--max_length=4',
)
_TINY_ENGINE = (
  '--rows=1,2',
  '--query_tokens=6,12',
  '--contexts=32,64',
  '--max_length=2',
)
_OUTPUT_TOKENS = 48
_LOADS = (0.3, 0.8)  # of what plain decoding can serve
_RUN_SECONDS = 8
# As the built-in model has them. Texts of random weights are none, so
# drafts are forced.
_SIZES = {
  'hidden_size': 576,
  'num_hidden_layers': 30,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'intermediate_size': 1536,
  'vocab_size': 49_152,
  'tie_word_embeddings': True,
}


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs; a load needs the costs, so they come first."""
  return [
    Job(
      name='costs',
      run=functools.partial(_measure_costs, settings),
      limit=300.0,
    ),
    *(
      Job(
        name='load',
        shape=f'{load:.0%} of plain decoding',
        run=functools.partial(_measure_load, settings, load),
        limit=150.0,
      )
      for load in _LOADS[: 1 if settings.tiny else None]
    ),
  ]


def _flags(settings: Settings) -> list[str]:
  """Returns the flags of the engine."""
  return [
    f'--target={_target(settings)}',
    '--mode=forced',
    f'--forced_acceptance={_ACCEPTANCE}',
    *(_TINY_ENGINE if settings.tiny else _ENGINE),
  ]


def _target(settings: Settings) -> str:
  """Returns SmolLM2-135M, or a model of its sizes."""
  name = None if settings.tiny else weights.find(settings)
  if name is not None:
    return name
  kind = 'tiny' if settings.tiny else 'smollm2-135m'
  directory = pathlib.Path(tempfile.gettempdir()) / f'random-{kind}'
  if not directory.exists():
    sizes = {} if settings.tiny else _SIZES
    with tempfile.TemporaryDirectory(dir=directory.parent) as partial:
      whole = pathlib.Path(partial) / 'model'
      testing.write_tiny_checkpoint(whole, **sizes)
      whole.rename(directory)
  return str(directory)


def _measure_costs(settings: Settings) -> list[Row]:
  path = settings.directory / _COSTS
  _run('profile_costs', *_flags(settings), '--repeats=3', f'--output={path}')
  costs = storage.load(path)
  buckets = costs.key.buckets
  found = [Row(figures={'target': costs.key.target})]
  for rows in buckets.rows:
    for length in (0, buckets.max_length):
      if rows * (1 + length) <= buckets.query_tokens[-1]:
        found.append(
          Row(
            name='step',
            shape=f'rows {rows}, draft tokens {length}',
            seconds=_step_seconds(costs, rows, length),
            reference_seconds=_step_seconds(costs, rows, 0),
            figures={'rows': rows, 'draft_tokens': length},
          )
        )
  return found


def _step_seconds(costs: MeasuredCosts, rows: int, length: int) -> float:
  """Returns the seconds of a step of rows that verify `length` tokens each."""
  buckets = costs.key.buckets
  num_tokens = buckets.pad_query_tokens(rows * (1 + length))
  steps = buckets.steps_of(length)
  return float(costs.predict(rows, num_tokens, 0.0, steps).total)


def _measure_load(settings: Settings, load: float) -> list[Row]:
  costs_path = settings.directory / _COSTS
  costs = storage.load(costs_path)
  most = costs.key.buckets.rows[-1]
  output_tokens = 6 if settings.tiny else _OUTPUT_TOKENS
  rate = load * most / _step_seconds(costs, most, 0) / output_tokens
  count = 4 if settings.tiny else int(np.clip(rate * _RUN_SECONDS, 20, 400))
  policies = ('none', f'fixed_{min(2, costs.key.buckets.max_length)}')
  if not settings.tiny:
    policies = (*policies, 'goodput')
  with tempfile.TemporaryDirectory() as directory:
    prompts = pathlib.Path(directory) / 'prompts.jsonl'
    output_files.write_lines(
      prompts,
      (
        {'question_id': i, 'task': 'short', 'turns': [f'What is {i} and {i}?']}
        for i in range(40)
      ),
    )
    results = pathlib.Path(directory) / 'results'
    _run(
      'serve_load',
      *_flags(settings),
      f'--costs={costs_path}',
      f'--policies={",".join(policies)}',
      f'--request_rates={rate}',
      f'--num_requests={count}',
      f'--output_tokens={output_tokens}',
      f'--prompts={prompts}',
      f'--output_dir={results}',
    )
    lines = output_files.read_lines(results / 'rows.jsonl')
  return [
    Row(figures={'request_rate': rate, 'num_requests': count}),
    *(_load_row(line, lines[0], load) for line in lines),
  ]


def _run(name: str, *flags: str) -> None:
  """Runs a program of `experiments`; raises UserError with its last line."""
  command = [sys.executable, '-m', f'experiments.{name}', *flags]
  process = subprocess.run(
    command, cwd=_ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
  )
  if process.returncode:
    lines = process.stderr.decode(errors='replace').split('\n')
    last = next((line for line in lines[::-1] if line.strip()), '')
    raise errors.UserError(f'{name}: {last.strip()}')


def _load_row(line, plain, load) -> Row:
  return Row(
    name=f'load, {line["policy"]}',
    shape=f'{load:.0%} of plain decoding',
    seconds=line['mean_tpot'],
    reference_seconds=plain['mean_tpot'],
    figures={
      name: line.get(name)
      for name in (
        'policy',
        'request_rate',
        'throughput',
        'mean_e2e_latency',
        'p99_e2e_latency',
        'acceptance_length',
        'step_time_error',
      )
    },
  )
