"""Finds the tree sizes and the split of the devices that decode fastest.

  python -m experiments.tune --draft=DRAFT --output=tuned.json
  swiftspec generate --config=tuned.json --prompt='Hello!'

Measures the forwards of target and draft. Sets the number of draft forwards
from the ratio r of the two: the better of r and r + 1. Then it tries the
neighbouring sizes by decoding prompts, and writes a configuration for --config.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

import swiftspec_jax as ss
from experiments.flags import run_flags
from experiments.measuring import benchmark_report, benchmark_run
from experiments.output import benchmark_output
from swiftspec_jax import errors
from swiftspec_jax.cli import configuration, output_files, program, step_times
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import (
  config_file,
  device_flags,
  flag_values,
  modes,
  shared_flags,
  tree_flags,
)

_MODE = flags.DEFINE_enum(
  'mode', 'async', modes.PERSISTENT_TREES, 'What to tune.'
)
_PROMPTS = run_flags.prompts()
_LIMIT = run_flags.limit(4)
_REPEATS = run_flags.repeats(3, 'How often to decode each prompt.')
_TRY = {
  'num_nodes': flags.DEFINE_list(
    'try_num_nodes', ['4', '8', '16'], 'Values of --num_nodes to try.'
  ),
  'width': flags.DEFINE_list(
    'try_width', ['4', '8', '16'], 'Values of --width to try.'
  ),
}
_OUTPUT = flags.DEFINE_string(
  'output', None, 'File of the configuration.', required=True
)

_DRAFT_STEPS = (1, 2, 4, 6)  # of serial mode
_MARGIN = 1.02  # gain that is worth a change; less may be noise


# One configuration that was tried, and whether it was chosen in its stage.
_Trial = dict[str, Any]


class _Tuner:
  """Tries trees on one split of the devices."""

  def __init__(self, split: tuple[int, int], prompts):
    device_flags.choose(*split)
    mode = _MODE.value
    self.split = split
    self._target = shared_flags.load_target()
    self._draft = shared_flags.load_draft(self._target, mode)
    self._bench = benchmark_run.Bench(
      self._target, prompts, shared_flags.sampling()
    )
    self._decoders: dict[ss.TreeConfig, ss.Decoder] = {}
    self._target_seconds: dict[int, float] = {}
    self._draft_seconds: dict[int, float] = {}

  def target_seconds(self, tree: ss.TreeConfig) -> float:
    """Returns the time of a target forward over the nodes of `tree`."""
    if tree.num_nodes not in self._target_seconds:
      seconds = step_times.target_step_seconds(self._decoder(tree))
      self._target_seconds[tree.num_nodes] = seconds
    return self._target_seconds[tree.num_nodes]

  def draft_seconds(self, tree: ss.TreeConfig) -> float:
    """Returns the time of a draft forward over the leaves of `tree`."""
    if tree.width not in self._draft_seconds:
      self._draft_seconds[tree.width] = step_times.draft_step_seconds(
        self._draft, tree, self._bench.max_tokens
      )
    return self._draft_seconds[tree.width]

  def with_steps(self, tree: ss.TreeConfig) -> list[ss.TreeConfig]:
    """Returns `tree` with the numbers of draft forwards that are worth a try.

    In mode async those of which the target's time is a multiple, rounded down
    and up; in serial mode, where the target waits for all, the usual ones.
    """
    most = max(tree.num_cache_rows // tree.width, 1)
    if _MODE.value == 'async':
      ratio = int(self.target_seconds(tree) / self.draft_seconds(tree))
      steps = (ratio, ratio + 1)
    else:
      steps = _DRAFT_STEPS
    chosen = sorted({min(max(number, 1), most) for number in steps})
    return [
      dataclasses.replace(tree, num_draft_steps=number) for number in chosen
    ]

  def compare(
    self, stage: str, trees: Sequence[ss.TreeConfig]
  ) -> tuple[ss.TreeConfig, list[_Trial]]:
    """Decodes the prompts with all `trees` in turn.

    Returns:
      The fastest, or the first if it is hardly slower; and what was measured.
    """
    by_name = {str(i): tree for i, tree in enumerate(dict.fromkeys(trees))}
    records = self._measure(stage, by_name)
    summary = benchmark_report.summarize(
      records, list(by_name), is_greedy=False
    )
    speeds = {n: summary[n]['tokens_per_second'] or 0.0 for n in by_name}
    best = max(speeds, key=lambda name: speeds[name])
    if speeds[best] < _MARGIN * speeds['0']:
      best = '0'
    trials = [
      {
        'stage': stage,
        'target_devices': self.split[0],
        'draft_devices': self.split[1] if _MODE.value == 'async' else None,
        **_sizes_of(tree),
        'tokens_per_second': speeds[name],
        'acceptance_length': summary[name]['acceptance_length'],
        'chosen': name == best,
      }
      for name, tree in by_name.items()
    ]
    return by_name[best], trials

  def _measure(self, stage, trees):
    runners = {
      name: self._bench.runner(self._decoder(tree), tree.forced_acceptance)
      for name, tree in trees.items()
    }
    samplings = [shared_flags.sampling()] * _REPEATS.value
    jobs = benchmark_run.plan(self._bench.encoded, list(trees), _REPEATS.value)
    records: list[benchmark_output.Record] = []
    benchmark_run.run(jobs, runners, samplings, records, label=stage)
    return records

  def _decoder(self, tree: ss.TreeConfig) -> ss.Decoder:
    if tree not in self._decoders:
      sizes = '/'.join(map(str, _sizes_of(tree).values()))
      decoder = ss.Decoder(
        self._target, self._draft, tree=tree, run_ahead=tree_flags.run_ahead()
      )
      label = f'compiling for bs/w/d {sizes}'
      self._decoders[tree] = self._bench.warmed(decoder, label)
    return self._decoders[tree]

  def describe_steps(self) -> str:
    """Returns a table of the measured times of a forward."""
    rows = [
      {'forward': who, 'tokens': size, 'seconds': seconds[size]}
      for who, seconds in (
        ('target', self._target_seconds),
        ('draft', self._draft_seconds),
      )
      for size in sorted(seconds)
    ]
    columns = {
      'forward': ('forward',),
      'tokens': ('tokens',),
      'ms': ('seconds', '.2f', 1e3),
    }
    return benchmark_report.table_of(rows, columns, num_names=1)


def main() -> None:
  """Runs the program."""
  config_file.apply()
  base = tree_flags.config_with_width()
  shared_flags.check([_MODE.value])
  for field in _TRY:
    _sizes(base, field)
  prompts = prompts_lib.read_prompts(pathlib.Path(_PROMPTS.value), _LIMIT.value)
  path = pathlib.Path(_OUTPUT.value)
  with output_files.writing(path), tempfile.TemporaryFile(dir=path.parent):
    pass
  tuner, tree, trials = _tune_splits(base, prompts)
  for field in _TRY:
    tree, tried = _tune_size(tuner, tree, field)
    trials += tried
  device_flags.choose(*tuner.split)
  settings = {
    **shared_flags.to_json(),
    **_sizes_of(tree),
    'mode': _MODE.value,
  }
  if _MODE.value == 'serial':
    settings['draft_devices'] = None
  configuration.write(path, settings, trials, jax.devices()[0].device_kind)
  print(_table(trials))
  print(_explain(tuner, tree))
  print(f'written to {path}')


def _tune_splits(
  base: ss.TreeConfig, prompts: Sequence[prompts_lib.Prompt]
) -> tuple[_Tuner, ss.TreeConfig, list[_Trial]]:
  """Returns the tuner of the best split, its best tree, and what was tried."""
  splits = device_flags.splits()
  if _MODE.value == 'serial':
    count = flag_values.of(device_flags)
    splits = [(count['target_devices'], count['draft_devices'])]
  trials: list[_Trial] = []
  best = None
  for split in splits:
    tuner = _Tuner(split, prompts)
    for field in _TRY:
      for value in _sizes(base, field):
        tree = dataclasses.replace(base, **{field: value})
        tuner.target_seconds(tree)
        tuner.draft_seconds(tree)
    devices = '+'.join(map(str, split)) if _MODE.value == 'async' else split[0]
    print(f'on {devices} devices\n{tuner.describe_steps()}\n', flush=True)
    trees = tuner.with_steps(base)
    if tree_flags.is_given('num_draft_steps'):
      trees = [base, *trees]
    tree, tried = tuner.compare('draft forwards', trees)
    trials += tried
    speed = max(t['tokens_per_second'] for t in tried if t['chosen'])
    if best is None or speed > best[0]:
      best = speed, tuner, tree
  return best[1], best[2], trials


def _sizes_of(tree: ss.TreeConfig) -> dict[str, int]:
  """Returns what is tuned of a tree."""
  names = 'num_nodes', 'width', 'num_draft_steps'
  return {name: getattr(tree, name) for name in names}


def _sizes(tree: ss.TreeConfig, field: str) -> list[int]:
  """Returns the values of a size to try, that of `tree` included."""
  sizes = {getattr(tree, field)}
  for text in _TRY[field].value:
    if not text.isdecimal():
      raise errors.UserError(
        f'--{_TRY[field].name}: {text!r} is not a whole number'
      )
    sizes.add(int(text))
    dataclasses.replace(tree, **{field: int(text)})  # checks it
  return sorted(sizes)


def _tune_size(
  tuner: _Tuner, tree: ss.TreeConfig, field: str
) -> tuple[ss.TreeConfig, list[_Trial]]:
  """Tries the sizes next to that of `tree`; each with its draft forwards."""
  value = getattr(tree, field)
  known = _sizes(tree, field)
  below = [size for size in known if size < value][-1:]
  above = [size for size in known if size > value][:1]
  candidates = [tree]
  for size in below + above:
    neighbour = dataclasses.replace(tree, **{field: size})
    is_async = _MODE.value == 'async'
    candidates += tuner.with_steps(neighbour) if is_async else [neighbour]
  return tuner.compare(field, candidates)


def _table(trials: Sequence[_Trial]) -> str:
  """Returns what was tried, as text for a terminal."""
  columns = {
    'tried': ('stage',),
    'devices': _devices,
    'bs': ('num_nodes',),
    'w': ('width',),
    'd': ('num_draft_steps',),
    'tokens/s': ('tokens_per_second', '.1f'),
    'acc. length': ('acceptance_length', '.2f'),
    '': lambda row: 'best' if row['chosen'] else '',
  }
  return benchmark_report.table_of(trials, columns, num_names=2)


def _devices(row: Mapping[str, Any]) -> str:
  counts = row['target_devices'], row['draft_devices']
  return '+'.join(str(count) for count in counts if count is not None)


def _explain(tuner: _Tuner, tree: ss.TreeConfig) -> str:
  """Returns what was chosen and why."""
  target, draft = tuner.target_seconds(tree), tuner.draft_seconds(tree)
  sizes = _sizes_of(tree).items()
  chosen = ' '.join(f'--{name}={value}' for name, value in sizes)
  lines = [
    f'chosen: {chosen}, the fastest of what was tried (a change must gain '
    f'{_MARGIN - 1:.0%}).',
    f'One target forward takes {target * 1e3:.2f} ms, as long as '
    f'{target / draft:.1f} of the draft ({draft * 1e3:.2f} ms each).',
  ]
  if tree.forced_acceptance is not None:
    lines.append(
      f'Forced acceptance {tree.forced_acceptance:g}: the draft was told the '
      'output; with its own guesses other sizes may be faster.'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  program.run(main)
