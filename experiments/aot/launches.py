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
  r'(?:body|condition|true_computation|false_computation)=%?([\w.-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_CALLED = re.compile(r'to_apply=%?([\w.-]+)')


def count(text: str) -> int:
  """Returns the kernels of a program, those of a loop or a branch once.

  Args:
    text: optimised HLO, `jax.stages.Compiled.as_text()`.
  """
  computations, entry = _computations(text)
  return sum(
    operation not in _WITHOUT_KERNEL and not operation.endswith('-done')
    for name in _reached(computations, entry)
    for operation, _ in computations[name]
  )


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


def _reached(
  computations: dict[str, list[tuple[str, str]]], entry: str
) -> Iterator[str]:
  """Yields the entry and what it runs, each once."""
  waiting, seen = [entry], {entry}
  while waiting:
    name = waiting.pop()
    yield name
    for operation, line in computations[name]:
      names = _RUN.findall(line)
      for branches in _BRANCHES.findall(line):
        names += [branch.strip(' %') for branch in branches.split(',')]
      if operation == 'call':
        names += _CALLED.findall(line)
      waiting += [new for new in names if new not in seen]
      seen.update(names)
