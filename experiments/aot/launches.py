"""How many kernels a compiled program starts, by its text.

On a GPU each instruction that does work is a kernel, or a call of a library:
XLA has fused what it could.
"""

import re
from collections.abc import Iterator

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
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\('
)
_HEAD = re.compile(r'^(ENTRY )?%?(\S+) \(.*\{$')
# Those that are run where they are named; others are inside of a kernel.
_RUN = re.compile(
  r'(?:condition|true_computation|false_computation)=%?([\w.-]+)'
)
_BODY = re.compile(r'body=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_CALLED = re.compile(r'to_apply=%?([\w.-]+)')
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
  computations, entry = _computations(text)
  found: dict[str, dict[str, int]] = {}
  waiting = [(ONCE, 1, [entry])]
  while waiting:
    name, turns, starts = waiting.pop()
    operations = [*_run(computations, starts)]
    part = found.setdefault(name, dict.fromkeys(_COUNTS, 0))
    part['num_kernels'] += turns * sum(
      _is_kernel(kind) for kind, _ in operations
    )
    part['num_all_reduces'] += turns * sum(
      kind in ('all-reduce', 'all-reduce-start') for kind, _ in operations
    )
    for kind, line in operations:
      if kind != 'while':
        continue
      starts = _BODY.findall(line) + _RUN.findall(line)
      if known := _TURNS.search(line):
        waiting.append((name, turns * int(known[1]), starts))
      else:
        loop = _NAME.search(line)
        waiting.append((loop[1] if loop else 'while', 1, starts))
  return found


def _is_kernel(operation: str) -> bool:
  return operation not in _WITHOUT_KERNEL and not operation.endswith('-done')


def _computations(
  text: str,
) -> tuple[dict[str, list[tuple[str, str]]], str]:
  """Returns operations and lines by the computation, and the entry's name."""
  found: dict[str, list[tuple[str, str]]] = {}
  name = entry = ''
  for line in text.splitlines():
    if head := _HEAD.match(line):
      name = head[2]
      found[name] = []
      entry = name if head[1] else entry
    elif instruction := _INSTRUCTION.match(line):
      found[name].append((instruction[1], line))
  return found, entry


def _run(
  computations: dict[str, list[tuple[str, str]]], starts: list[str]
) -> Iterator[tuple[str, str]]:
  """Yields the operations of computations and of what they run, each once.

  The bodies of loops are left out.
  """
  waiting, seen = [*starts], {*starts}
  while waiting:
    for operation, line in computations[waiting.pop()]:
      yield operation, line
      names = _RUN.findall(line)
      for branches in _BRANCHES.findall(line):
        names += [branch.strip(' %') for branch in branches.split(',')]
      if operation == 'call':
        names += _CALLED.findall(line)
      waiting += [new for new in names if new not in seen]
      seen.update(names)
