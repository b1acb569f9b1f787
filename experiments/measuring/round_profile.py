"""How long the parts of a tree round take.

The seconds of the programs are those of a timeline, without a profiler. A
second decode, under the profiler, says which share of a program's time each
part has.
"""

import collections
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from tqdm import tqdm

import swiftspec_jax as ss
from experiments.kernels import kernel_timing
from experiments.measuring import benchmark_run, round_parts
from swiftspec_jax import errors
from swiftspec_jax.cli import tracing


def measure(
  plain: ss.Decoder,
  decoder: ss.Decoder,
  timeline: ss.Timeline,
  models: Sequence[ss.Model],
  requests: Sequence[ss.Request],
) -> list[dict[str, Any]]:
  """Takes the rounds of a decoder apart.

  Args:
    plain: decodes without a draft.
    decoder: decodes with a tree of fixed size.
    timeline: timeline of `decoder`.
    models: target and draft of `decoder`.
    requests: decoded one after the other; medians of them count.

  Returns:
    Lines of rows.jsonl: `part` ('PROGRAM/PART' for one of a program), `seconds`
    of a round, and their `share` of it.

  Raises:
    UserError: the profiler does not know the operations of this platform.
  """
  decode_plainly = benchmark_run.make_decode(plain)
  decode = benchmark_run.make_decode(decoder)
  figures = collections.defaultdict(list)
  times = collections.Counter()
  for request in tqdm(requests, desc='measuring', unit='prompt'):
    stats = decode_plainly(request).stats
    figures['plain_seconds'].append(1 / stats.tokens_per_second)
    traced = tracing.trace(timeline, lambda r=request: decode(r))
    for name, value in traced.summary.items():
      figures[name].append(value)
    times.update(times_of_operations(lambda r=request: decode(r)))
  medians = {name: statistics.median(x) for name, x in figures.items()}
  shares = [
    _shares(times, names, model)
    for names, model in zip(
      (round_parts.TARGET_PROGRAMS, round_parts.DRAFT_PROGRAMS),
      models,
      strict=True,
    )
  ]
  return _rows(medians, *shares)


def times_of_operations(run: Callable[[], Any]) -> collections.Counter:
  """Returns the ns of each (program, operation) while `run` runs.

  Raises:
    UserError: the profiler does not know the operations of this platform.
  """
  times = collections.Counter()
  for plane in kernel_timing.profile(run).planes:
    for line in plane.lines:
      times.update(round_parts.self_times(_events(line)))
  if not times:
    raise errors.UserError(
      f'the profiler gives no times of operations on '
      f'{jax.default_backend()}; set JAX_PLATFORMS=cpu'
    )
  return times


def _events(line) -> Iterator[round_parts.Event]:
  for event in line.events:
    if '::' in event.name:  # of the runtime; there are many, read slowly
      continue
    stats = dict(event.stats)
    if 'hlo_op' in stats:
      names = stats['hlo_module'], stats['hlo_op']
      yield event.start_ns, event.duration_ns, *names


def compiled_programs(names: Collection[str]) -> list[round_parts.Program]:
  """Returns the programs of these names that this process has compiled."""
  modules = (
    module
    for executable in jax.devices()[0].client.live_executables()
    for module in executable.hlo_modules()
  )
  return [
    round_parts.read_program(module.to_string())
    for module in modules
    if module.name in names
  ]


def _shares(times, names, model) -> dict[str, float]:
  """Returns the share of each part in the programs of `names`."""
  programs = compiled_programs(names)
  weights = _weights(model)
  found = {}
  for name in names:
    of_name = {op: t for (program, op), t in times.items() if program == name}
    # Others may have compiled the same function for other sizes.
    program = max(
      (program for program in programs if program.name == name),
      key=lambda x: sum(t for op, t in of_name.items() if op in x.operations),
      default=None,
    )
    if of_name and program:
      found[name] = round_parts.parts(program, weights)
  return round_parts.shares(times, found)


def _weights(model: ss.Model) -> round_parts.Weights:
  """Returns the sizes of the weights of a model on one device."""
  params = model.params
  tables = {'embedding', 'unembedding'} & params.keys()
  others = [x for name, x in params.items() if name not in (*tables, 'layers')]
  layers = [x for layer in params['layers'] for x in layer.values()]
  return round_parts.Weights(
    products=frozenset(_num_elements(x) for x in layers + others) - {0},
    tables=frozenset(_num_elements(params[name]) for name in tables),
  )


def _num_elements(weight) -> int:
  """Returns how many elements a matrix has; 0 for what is none."""
  return max(
    leaf.addressable_shards[0].data.size if leaf.ndim > 1 else 0
    for leaf in jax.tree.leaves(weight)
  )


def _rows(figures, target_shares, draft_shares) -> list[dict[str, Any]]:
  whole = figures['round_seconds']
  target, draft = figures['target_busy_seconds'], figures['draft_busy_seconds']
  overlap = figures['overlap_seconds']
  seconds = {
    'plain_step': figures['plain_seconds'],
    'round': whole,
    'target': target,
    **{f'target/{name}': x * target for name, x in target_shares.items()},
    'draft': draft,
    **{f'draft/{name}': x * draft for name, x in draft_shares.items()},
    'overlap': overlap,
    'idle': whole - (target + draft - overlap),
    'dispatch': figures['host_dispatch_seconds'],
    'host': figures['host_read_seconds'],
  }
  if 'draft_step_seconds' in figures:
    seconds['draft_forward'] = figures['draft_step_seconds']
  return [
    {'part': part, 'seconds': x, 'share': x / whole}
    for part, x in seconds.items()
  ]
