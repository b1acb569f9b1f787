r"""Measures how long the steps of an engine take.

  python -m experiments.profile_costs --mode=chain --draft=DRAFT \
    --output=costs.json

Runs the engine's own compiled programs, in turn and several times. These are
plain steps, steps of all declared sizes and contexts, drafts of all lengths,
and chunks of prompts that a draft model reads. The whole engine with invented
requests tells the host's part. The times, fitted, go to a file that
`serve_load` and `simulate_load` take. It holds for these models, devices and
sizes only.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tqdm
from absl import flags

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.kernels.kernel_timing import wall_seconds
from experiments.load import load_replay
from experiments.measuring import benchmark_report
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files, program
from swiftspec_jax.cli.flags import engine_flags
from swiftspec_jax.engine.engine import Engine, StepRecord
from swiftspec_jax.policies.cost_model import measured, storage
from swiftspec_jax.policies.cost_model.measured import (
  MeasuredCosts,
  Measurement,
)
from swiftspec_jax.policies.fixed_length import FixedLength
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes

_OUTPUT = flags.DEFINE_string(
  'output', None, 'File for the costs; replaced if it is there.', required=True
)
_REPEATS = run_flags.repeats(
  9, 'Measurements of which the lower quartile counts.'
)

_LEAST_SIZES = 3
_PROMPT_TOKENS = 24  # of invented requests
# What is measured, without its seconds, and what measures them once.
Trial = tuple[Measurement, Callable[[], float]]


def main() -> None:
  """Runs the program."""
  declared = engine_flags.sizes()
  _check_sizes(declared)
  path = pathlib.Path(_OUTPUT.value)
  with output_files.writing(path.parent):
    path.parent.mkdir(parents=True, exist_ok=True)
  engine, target = engine_flags.make_engine(declared)
  key = engine_flags.cost_key(engine, target, declared)
  engine.programs.compile_all(show_progress='compiling')
  trials = [
    *_target_trials(engine, declared),
    *_draft_trials(engine, declared),
    *_prefill_trials(engine, declared),
  ]
  seconds: list[list[float]] = [[] for _ in trials]
  records: list[StepRecord] = []
  with tqdm.tqdm(
    total=_REPEATS.value * (len(trials) + 1), desc='measuring', unit='step'
  ) as progress:
    # In turn: a machine whose speed drifts hurts all sizes alike.
    for _ in range(_REPEATS.value):
      for own, (_, run) in zip(seconds, trials, strict=True):
        own.append(run())
        progress.update()
      records += _serve(engine, declared)
      progress.update()
  # The lower quartile: other work on the machine only adds time.
  measurements = [
    dataclasses.replace(what, seconds=float(np.percentile(own, 25)))
    for own, (what, _) in zip(seconds, trials, strict=True)
  ]
  measurements = _with_host(measurements, records, declared)
  costs = measured.fit(key, measurements)
  with output_files.writing(path):
    storage.save(path, costs)
  print(_table(costs, measurements))
  print(_check(costs, records))
  print(f'written to {path}')


def _check_sizes(declared: ProgramSizes) -> None:
  """Raises UserError if there are too few sizes for the fits."""
  mixed = {(flat.num_rows, flat.num_tokens) for flat in declared.all_mixed()}
  for names, count in (
    ('--rows and --contexts', len(list(declared.all_plain()))),
    ('--rows and --query_tokens', len(mixed)),
  ):
    if count < _LEAST_SIZES:
      raise errors.UserError(
        f'{names} make {count} sizes of steps, the fit needs at least '
        f'{_LEAST_SIZES}'
      )


def _target_trials(engine: Engine, declared: ProgramSizes) -> Iterator[Trial]:
  """Yields trials of plain steps and of all others."""
  parts = ('plain', declared.all_plain()), ('target', declared.all_mixed())
  for part, sizes in parts:
    for flat in sizes:
      for positions in _positions(declared, flat):
        what = Measurement(
          part=part,
          num_rows=flat.num_rows,
          num_query_tokens=flat.num_tokens if part == 'target' else 0,
          kv_tokens=engine.trial(flat, positions).kv_tokens,
          seconds=0.0,
        )
        run = functools.partial(wall_seconds, engine.trial, flat, positions)
        yield what, run


def _positions(declared: ProgramSizes, flat: StepSizes) -> list[int]:
  """Returns the fewest and the most positions of rows for a program."""
  fewest, most = declared.range_of(flat.context)
  new = -(-flat.num_tokens // min(flat.num_rows, flat.num_tokens))
  return [min(max(fewest, new), most), most]


def _draft_trials(engine: Engine, declared: ProgramSizes) -> Iterator[Trial]:
  """Yields trials of drafts, for each number of forwards its longest one."""
  buckets = declared.scheduler.buckets
  lengths = dict(zip(buckets.draft_steps, buckets.lengths, strict=True))
  ranges = map(declared.range_of, declared.contexts)
  ends = [(low, high - buckets.max_length) for low, high in ranges]
  for rows, known, (steps, length) in itertools.product(
    buckets.rows, itertools.chain.from_iterable(ends), lengths.items()
  ):
    what = Measurement(
      part='draft',
      num_rows=rows,
      kv_tokens=rows * (known - 1),
      num_draft_steps=steps,
      seconds=0.0,
    )
    yield what, functools.partial(_draft, engine.drafter, rows, known, length)


def _draft(drafter, rows: int, known: int, length: int) -> float:
  """Returns the seconds of a draft."""
  # What a drafter does on the host is overhead.
  if not length or not drafter.has_programs:
    return 0.0
  return wall_seconds(drafter.trial, rows, known, length)


def _prefill_trials(engine: Engine, declared: ProgramSizes) -> Iterator[Trial]:
  """Yields trials of a chunk that a draft model reads."""
  if not engine.drafter.has_programs:
    return
  for rows, context in itertools.product(
    declared.scheduler.buckets.rows, declared.contexts
  ):
    known = declared.range_of(context)[1]
    what = Measurement(
      part='intake', num_rows=rows, kv_tokens=rows * known, seconds=0.0
    )
    run = engine.drafter.trial_prefill
    yield what, functools.partial(wall_seconds, run, rows, known)


def _serve(engine: Engine, declared: ProgramSizes) -> list[StepRecord]:
  """Returns what steps of invented requests took, with and without drafts."""
  buckets = declared.scheduler.buckets
  records = []
  for rows, length in itertools.product(buckets.rows, buckets.lengths):
    engine.policy = _Waiting(length)
    handles = [engine.submit(_request(row)) for row in range(rows)]
    while engine.num_requests:
      record = engine.step()
      if record and record.step.num_decoding == rows == len(record.step.slots):
        records.append(record)
    for handle in handles:
      handle.result()
  return records


class _Waiting(FixedLength):
  """Waits for the draft, as policies do that ask how confident it is."""

  def plan_verify(self, view, plan, drafts):
    if drafts.node_confidences is not None:
      drafts.node_confidences()
    return super().plan_verify(view, plan, drafts)


def _request(seed: int) -> ss.Request:
  """Returns a request whose prompt repeats itself."""
  tokens = np.random.default_rng(seed).integers(0, 200, 4).tolist()
  return ss.Request(
    token_ids=tuple(tokens * (_PROMPT_TOKENS // 4)),
    sampling=ss.SamplingParams(max_new_tokens=8, ignore_eos=True),
  )


def _with_host(
  measurements: Sequence[Measurement],
  records: Sequence[StepRecord],
  declared: ProgramSizes,
) -> list[Measurement]:
  """Adds what the host does in whole steps, and the overhead of drafts.

  Every step has the host's part of a plain one. What steps with drafts take
  beyond that and their forwards is their overhead: one number for all, as it
  is small and its differences are noise.
  """
  plain = [r for r in records if not r.draft_plan.lengths.any()]
  host = max(0.0, _rest(plain, measurements, declared))
  result = [
    dataclasses.replace(m, seconds=m.seconds + host)
    if m.part in ('plain', 'target')
    else m
    for m in measurements
  ]
  drafted = [r for r in records if r.step.lengths.any()]
  overhead = max(0.0, _rest(drafted, result, declared)) if drafted else 0.0
  sizes = {(m.num_rows, m.num_query_tokens) for m in result}
  return result + [
    Measurement(
      part='overhead', num_rows=rows, num_query_tokens=size, seconds=overhead
    )
    for rows, size in sorted(sizes)
    if size
  ]


def _rest(
  records: Sequence[StepRecord],
  measurements: Sequence[Measurement],
  declared: ProgramSizes,
) -> float:
  """Returns what steps take beyond their forwards.

  Raises:
    UserError: no step has a size that was measured.
  """
  # The shortest context of each counts.
  forwards = {
    (m.part, m.num_rows, m.num_query_tokens, m.num_draft_steps): m.seconds
    for m in measurements[::-1]
  }
  rests = []
  for record in records:
    step = record.step
    if step.lengths.any():
      place = 'target', step.padded_rows, step.padded_query_tokens, 0
    else:
      place = 'plain', step.padded_rows, 0, 0
    longest = int(record.draft_plan.lengths.max(initial=0))
    num_steps = declared.scheduler.buckets.steps_of(longest)
    draft = 'draft', step.padded_rows, 0, num_steps
    if place in forwards and not record.prefills_draft:
      rests.append(record.seconds - forwards[place] - forwards.get(draft, 0.0))
  if not rests:
    raise errors.UserError(
      'no whole step of the invented requests had a size that was measured; '
      'declare other --rows, --query_tokens or --contexts'
    )
  return float(np.percentile(rests, 25))


def _table(costs: MeasuredCosts, measurements: Sequence[Measurement]) -> str:
  """Returns the measured times, and how far the tables are from them."""
  found = []
  for part, table in costs.parts.items():
    for rows in costs.key.buckets.rows:
      own = [m for m in measurements if (m.part, m.num_rows) == (part, rows)]
      if not own:
        continue
      seconds = np.array([m.seconds for m in own])
      fitted = np.array(
        [
          table(rows, m.num_query_tokens or m.num_draft_steps, m.kv_tokens)
          for m in own
        ]
      )
      difference = np.abs(fitted - seconds)
      error = difference / np.maximum(seconds, difference + 1e-9)
      spans = {'from': seconds.min(), 'to': seconds.max()}
      errors_of = {'mean': error.mean(), 'max': error.max()}
      of_rows = {'part': part, 'rows': rows, 'points': len(own)}
      found.append({**of_rows, **spans, **errors_of})
  columns = {
    'part': ('part',),
    'rows': ('rows',),
    'points': ('points',),
    'from (ms)': ('from', '.2f', 1e3),
    'to (ms)': ('to', '.2f', 1e3),
    'mean error': ('mean', '.1%'),
    'max': ('max', '.1%'),
  }
  return benchmark_report.table_of(found, columns, num_names=1)


def _check(costs: MeasuredCosts, records: Sequence[StepRecord]) -> str:
  """Returns a sentence on predicted against measured whole steps."""
  found = [load_replay.step_error(costs, record) for record in records]
  return (
    f'{len(found)} whole steps: predicted times are off by '
    f'{statistics.median(found):.1%} (median)'
  )


if __name__ == '__main__':
  program.run(main)
