"""How many kernels a compiled program starts, by its text.

On a GPU each instruction that does work is a kernel, or a call of a library:
XLA has fused what it could.
"""

import re
from collections.abc import Iterator

from experiments.measuring import round_parts
from experiments.measuring.round_parts import Operation, Program

# What only names, passes on or awaits values, or runs other computations.
_WITHOUT_KERNEL = {
  'after-all',
  'bitcast',
  'call',
  'conditional',
  'constant',
  'get-tuple-element',
  'parameter',
  'partition-id',
  'replica-id',
  'tuple',
  'while',
}
# Those that are run where they are named; others are inside of a kernel.
_RUN = re.compile(
  r'(?:condition|true_computation|false_computation)=%?([\w.-]+)'
)
_BODY = re.compile(r'body=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_NAME = re.compile(r'op_name="([^"]*)"')
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ONCE = ''  # what is in no loop
_COUNTS = 'num_kernels', 'num_all_reduces'


def by_loop(text: str) -> dict[str, dict[str, int]]:
  """Returns `num_kernels`, and `num_all_reduces` among them, by the part.

  A part is what is in no loop, `ONCE`, or a turn of a loop, by the name that it
  has in JAX. The condition of a loop is a part of both, as it is evaluated
  once more. A loop whose number of turns the compiler knows is no part of its
  own: it belongs to what it is in, with all turns. Branches count once each.

  Args:
    text: optimised HLO, `jax.stages.Compiled.as_text()`.
  """
  program = round_parts.read_program(text)
  found: dict[str, dict[str, int]] = {}
  waiting = [(ONCE, 1, [program.entry])]
  while waiting:
    name, turns, starts = waiting.pop()
    operations = [*_run(program, starts)]
    part = found.setdefault(name, dict.fromkeys(_COUNTS, 0))
    kinds = [operation.opcode for operation in operations]
    part['num_kernels'] += turns * sum(map(_is_kernel, kinds))
    part['num_all_reduces'] += turns * sum(
      kind in ('all-reduce', 'all-reduce-start') for kind in kinds
    )
    for operation in operations:
      if operation.opcode != 'while':
        continue
      starts = _BODY.findall(operation.line) + _RUN.findall(operation.line)
      if known := _TURNS.search(operation.line):
        waiting.append((name, turns * int(known[1]), starts))
      else:
        loop = _NAME.search(operation.line)
        waiting.append((loop[1] if loop else 'while', 1, starts))
  return found


def _is_kernel(operation: str) -> bool:
  return operation not in _WITHOUT_KERNEL and not operation.endswith('-done')


def _run(program: Program, starts: list[str]) -> Iterator[Operation]:
  """Yields the operations of computations and of what they run, each once.

  The bodies of loops are left out.
  """
  waiting, seen = [*starts], {*starts}
  while waiting:
    for name in program.computations[waiting.pop()]:
      operation = program.operations[name]
      yield operation
      names = _RUN.findall(operation.line)
      for branches in _BRANCHES.findall(operation.line):
        names += [branch.strip(' %') for branch in branches.split(',')]
      if operation.opcode == 'call':
        names.append(operation.called)
      waiting += [new for new in names if new not in seen]
      seen.update(names)
