"""Which part of a round each operation belongs to.

Pure functions over the text of compiled programs and the times of their
operations. Where an operation lies is told by its `jax.named_scope`. XLA makes
some that have none, mostly products; those belong where their users do.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

# The programs of a round by the names of their modules.
TARGET_PROGRAMS = ('jit_run_step', 'jit_run_searching_step')
DRAFT_PROGRAMS = ('jit_take_turn', 'jit_advance', 'jit_grow', 'jit_read_row')

PRODUCTS, UNEMBEDDING, ATTENTION = 'products', 'unembedding', 'attention'
REST, OTHER = 'rest', 'other'
# The part that a scope stands for; the innermost known scope counts.
_PARTS = {
  'target_forward': REST,
  'read_verified': REST,
  'take_in': REST,
  'fuse_features': REST,
  'layer': REST,
  'attention': ATTENTION,
  'children': 'children',
  'verify': 'verify',
  'commit': 'commit',
  'reroot': 'reroot',
  'look_up': 'look_up',
  'restart': 'growth',
  'grow': 'growth',
  'select': 'select',
}
# As XLA prints them: "  ROOT %name = f32[8,2]{1,0} dot(%a, %b), attributes".
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\((.*)')
_COMPUTATION = re.compile(r'(ENTRY )?%?(\S+) \(.*\{$')
_SHAPE = re.compile(r'\w+\[([\d,]*)\]')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(r'(?:calls|to_apply)=%?([\w.\-]+)')
# What XLA puts in for an operation has its name, but not its scopes.
_SCOPE = re.compile(r'op_name="([^"]*/[^"]*)"')
_LAYER_NUMBER = re.compile(r'_\d+$')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """Numbers of elements, on one device, by which products are told apart.

  Attributes:
    products: numbers for the matrices of the layers.
    tables: numbers for the tables that hidden states are compared with.
  """

  products: frozenset[int]
  tables: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """An instruction of a compiled program.

  Attributes:
    opcode: kind of operation.
    size: elements of its result, or of the first array of a tuple.
    operands: names of its operands.
    called: name of the computation that it applies, or None.
    scope: path of the named scopes around it; empty if not known.
    line: text of the instruction.
  """

  opcode: str
  size: int
  operands: tuple[str, ...]
  called: str | None
  scope: str
  line: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A compiled program.

  Attributes:
    name: name of its module.
    operations: operations by name, those that others need first.
    computations: names of the operations of each computation.
    entry: name of the computation that it begins with.
  """

  name: str
  operations: Mapping[str, Operation]
  computations: Mapping[str, Sequence[str]]
  entry: str


def read_program(text: str) -> Program:
  """Reads a program as XLA prints it."""
  header, *lines = text.splitlines()
  operations, computations, names, entry = {}, {}, [], ''
  for line in lines:
    if found := _COMPUTATION.match(line):
      names = computations.setdefault(found[2], [])
      entry = found[2] if found[1] else entry
    elif found := _INSTRUCTION.match(line):
      name, shape, opcode, rest = found.groups()
      called, scope = _CALLED.search(rest), _SCOPE.search(rest)
      names.append(name)
      operations[name] = Operation(
        opcode=opcode,
        size=_size(shape),
        operands=tuple(_OPERAND.findall(rest.partition(')')[0])),
        called=called and called[1],
        scope=scope[1] if scope else '',
        line=line,
      )
  return Program(
    name=header.split()[1].rstrip(','),
    operations=operations,
    computations=computations,
    entry=entry,
  )


def _size(shape: str) -> int:
  found = _SHAPE.search(shape)
  return math.prod(map(int, filter(None, found[1].split(',')))) if found else 0


def parts(program: Program, weights: Weights) -> dict[str, str]:
  """Returns the part of a round that each operation belongs to."""
  scopes = _scopes(program)
  return {
    name: _part(scopes[name], _factors(program, name), weights)
    for name in program.operations
  }


def _part(scope: str, factors: set[int], weights: Weights) -> str:
  if factors & weights.products:
    return PRODUCTS
  if factors & weights.tables:
    return UNEMBEDDING
  names = [_LAYER_NUMBER.sub('', name) for name in scope.split('/')]
  part = next((_PARTS[x] for x in reversed(names) if x in _PARTS), OTHER)
  # In a model, what multiplies no weights are queries, keys and values.
  return ATTENTION if factors and part == REST else part


def _factors(program: Program, name: str) -> set[int]:
  """Returns the sizes of what an operation multiplies, if it is a product."""
  operation = program.operations[name]
  if operation.opcode == 'dot':
    return {program.operations[x].size for x in operation.operands}
  inner = program.computations.get(operation.called, ())
  return set().union(*(_factors(program, x) for x in inner))


def _scopes(program: Program) -> dict[str, str]:
  """Returns the scope of each operation: its own, or that of neighbours."""
  operations = program.operations
  scopes = {}
  for name, operation in operations.items():  # those that are called first
    inner = program.computations.get(operation.called, ())
    inherited = (scopes[x] for x in reversed(inner) if scopes[x])
    scopes[name] = operation.scope or next(inherited, '')
  for name in reversed(operations):
    # A tuple has results of many parts.
    if scopes[name] and operations[name].opcode != 'tuple':
      for operand in operations[name].operands:
        scopes[operand] = scopes[operand] or scopes[name]
  for name, operation in operations.items():
    inherited = (scopes[x] for x in operation.operands if scopes[x])
    scopes[name] = scopes[name] or next(inherited, '')
  return scopes


# When an operation began and how long it took, in ns; its program and name.
Event = tuple[float, float, str, str]


def self_times(events: Iterable[Event]) -> collections.Counter:
  """Returns a thread's ns by (program, operation), without those inside it."""
  times = collections.Counter()
  stack = []  # of ends and keys
  for start, duration, *key in sorted(events, key=lambda x: (x[0], -x[1])):
    while stack and stack[-1][0] <= start:
      stack.pop()
    if stack:
      times[stack[-1][1]] -= duration
    times[tuple(key)] += duration
    stack.append((start + duration, tuple(key)))
  return times


def shares(
  times: Mapping[tuple[str, str], float],
  parts_by_program: Mapping[str, Mapping[str, str]],
) -> dict[str, float]:
  """Returns each part's share of the time of some programs, largest first.

  Args:
    times: times of (program, operation); other programs do not count.
    parts_by_program: the part of each operation, for each program.
  """
  totals = collections.Counter()
  for (program, name), time in times.items():
    if program in parts_by_program:
      totals[parts_by_program[program].get(name, OTHER)] += time
  whole = sum(totals.values())
  return {part: time / whole for part, time in totals.most_common()}
