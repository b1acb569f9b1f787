"""Data that the target writes on the device, and a draft trained on it.

Each call writes data of a seed of its own, so it needs no files of former
ones, and trains the draft of the last call further.
"""

import functools
import pathlib
import time
import zipfile
from collections.abc import Sequence

from experiments.accelerator import programs, weights
from experiments.accelerator import rows as rows_lib
from experiments.accelerator.rows import Row
from experiments.accelerator.sections import Job, Settings
from swiftspec_jax import errors
from swiftspec_jax.cli import output_files
from swiftspec_jax.distillation import shards
from swiftspec_jax.distillation.writing import generation

_DATA_NAME = 'data'
_SHARDS = 'shards'
_DRAFT = 'draft.zip'
_DRAFT_FILES = ('config.json', 'draft.safetensors', 'metrics.jsonl')
_ARCHIVE_BYTES = 15 * 2**20
_ARCHIVES = 'data-*.zip'
_MOST_ARCHIVES = 2  # in the directory of the report
_SHARDS_OF_CALL = 1000  # numbers that a call has for its shards
_FIRST_STEPS = 200
_MOST_STEPS = 5000
_SHARE = 0.42  # of the section's time, for data and for steps


def jobs(settings: Settings) -> list[Job]:
  """Returns the jobs of one call, which no other call has."""
  name = weights.find(settings)
  if name is None:
    return [weights.missing('data and draft')]
  former = [
    row
    for row in rows_lib.read(settings.directory)
    if row.section == 'training'
  ]
  call = sum(row.name == _DATA_NAME for row in former)
  speeds = [
    row.seconds for row in former if row.name == 'draft' and row.seconds
  ]
  work = settings.work / f'training-{call}'
  limit = settings.seconds * _SHARE
  return [
    Job(
      name=_DATA_NAME,
      shape=f'call {call}',
      run=functools.partial(_write_data, settings, name, work, call),
      limit=limit + 60,
    ),
    Job(
      name='draft',
      shape=f'call {call}',
      run=functools.partial(_train, settings, name, work, speeds),
      limit=limit + 60,
    ),
  ]


def _write_data(settings, target, work, call) -> list[Row]:
  directory = work / 'data'
  start = time.perf_counter()
  programs.run(
    'generate_data',
    f'--target={target}',
    f'--output_dir={directory}',
    f'--num_tokens={10 if settings.tiny else 10**9}',
    f'--seed={call}',
    '--top_logprobs=8',
    seconds=settings.seconds * _SHARE,
  )
  seconds = time.perf_counter() - start
  found = _number(shards.find_shards(directory), work / _SHARDS, call)
  if not found:
    raise errors.UserError(f'no shard was complete after {seconds:.0f} s')
  reports = [
    generation.report(i, shards.read_shard(path)[0])
    for i, path in enumerate(found)
  ]
  num_tokens = sum(report.num_answer_tokens for report in reports)
  return [
    Row(
      seconds=seconds / max(num_tokens, 1),
      figures={
        'answer_tokens': num_tokens,
        'tokens_per_second': num_tokens / seconds,
        'all_tokens': sum(report.num_tokens for report in reports),
        'num_shards': len(found),
        'num_shards_kept': _pack(found, settings.directory, call),
      },
    )
  ]


def _number(
  found: Sequence[tuple[int, pathlib.Path]], directory: pathlib.Path, call: int
) -> list[pathlib.Path]:
  """Moves shards to numbers that no other call has; returns where they are."""
  directory.mkdir(parents=True, exist_ok=True)
  return [
    path.rename(shards.shard_path(directory, call * _SHARDS_OF_CALL + number))
    for number, path in found
  ]


def _pack(
  paths: Sequence[pathlib.Path], directory: pathlib.Path, call: int
) -> int:
  """Puts shards into small archives; returns how many found room."""
  left = list(paths)
  for number in range(_MOST_ARCHIVES - len(list(directory.glob(_ARCHIVES)))):
    archive = directory / f'data-{call:02}-{number}.zip'
    with zipfile.ZipFile(archive, 'w', zipfile.ZIP_DEFLATED) as file:
      while left and file.fp.tell() + left[0].stat().st_size < _ARCHIVE_BYTES:
        path = left.pop(0)
        file.write(path, path.name)
    if not left:
      break
  return len(paths) - len(left)


def _train(settings, target, work, speeds) -> list[Row]:
  data, directory = work / _SHARDS, work / 'draft'
  for archive in settings.directory.glob(_ARCHIVES):
    with zipfile.ZipFile(archive) as file:
      file.extractall(data)
  start_from = []
  former = settings.directory / _DRAFT
  if former.exists():
    with zipfile.ZipFile(former) as file:
      file.extractall(work / 'former')
    start_from = [f'--start_from={work / "former"}']
  seconds = settings.seconds * _SHARE
  num_steps = _FIRST_STEPS
  if speeds:
    num_steps = min(max(int(seconds / speeds[-1]), 10), _MOST_STEPS)
  if settings.tiny:
    num_steps = 2
  is_complete = programs.run(
    'train_draft',
    f'--target={target}',
    f'--data={data}',
    f'--output_dir={directory}',
    '--init_layers=0,1',
    f'--output_vocab_size={100 if settings.tiny else 8192}',
    f'--tokens_per_batch={2048 if settings.tiny else 16_384}',
    f'--num_steps={num_steps}',
    f'--warmup_steps={num_steps // 10}',
    f'--evaluate_every={max(num_steps // 4, 1)}',
    '--stored_dtype=int8',
    *start_from,
    seconds=seconds,
  )
  return [_training_row(directory, settings.directory, is_complete)]


def _training_row(directory, report_directory, is_complete) -> Row:
  """Keeps the draft; returns what its log says."""
  lines = output_files.read_lines(directory / 'metrics.jsonl')
  times = [
    (line['step'], line['seconds']) for line in lines if 'seconds' in line
  ]
  held_out = [line['held_out']['all'] for line in lines if 'held_out' in line]
  if (directory / 'draft.safetensors').exists():
    with zipfile.ZipFile(report_directory / _DRAFT, 'w') as file:
      for name in _DRAFT_FILES:
        file.write(directory / name, name)
  if not times:
    raise errors.UserError('no step of training was complete')
  (first, begin), (last, end) = times[0], times[-1]
  return Row(
    # The first step compiles.
    seconds=(end - begin) / max(last - first, 1),
    figures={
      'num_steps': last,
      'is_complete': is_complete,
      'losses': [
        line['training']['loss'] for line in lines if 'training' in line
      ][:: max(len(times) // 50, 1)],
      **{
        f'{name}_{when}': figures[name]
        for when, figures in (('before', held_out[0]), ('after', held_out[-1]))
        for name in ('agreement', 'chain_acceptance_length')
      },
    },
  )
