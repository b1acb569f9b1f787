"""Kernels that the programs of a round start.

Those of the papers' programs are what their text names, for want of a count.
Ours are in `launches.jsonl`, counted in what the GPU compiler of jax 0.10.2
made on 2026-11-28, by

  python -m experiments.aot --suite=launches --target=h200 --output=DIR
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

from swiftspec_jax.simulator.planning.forward import Launches

_COUNTED = pathlib.Path(__file__).with_name('launches.jsonl')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
  """The kernels of a round.

  Attributes:
    verify: kernels of a verification.
    grow: kernels of an expansion of the tree, the draft's forward among them.
    advance: kernels of the draft between a verdict and what it sends next,
      where no forward is missing.
  """

  verify: Launches
  grow: Launches
  advance: Launches


# Dtype of the matrices, None for bfloat16, and whether kernels are fused.
ProgramsOf = Callable[[str | None, bool], Programs]

# Of the papers' programs. All have an embedding, a last norm, logits, a choice.
# A layer of vLLM: norm, q-k-v, rotation, cache write, attention in two, its
# output, norm, gate and up, their product, down.
VLLM = Launches(layer=11, rest=4)
# SwiftSpec, section 3.3: attention is one, gate and up with their product
# another.
SWIFTSPEC = Launches(layer=7, rest=4)
# Choosing leaves, putting children in the tree; re-rooting and selecting.
# Assumed: in the paper the host does it, and its time is not told.
_TREE_KERNELS = 20


def published(weight_dtype: str | None, is_fused: bool) -> Programs:
  """Returns the kernels of the papers, the same for all dtypes."""
  del weight_dtype
  forward = SWIFTSPEC if is_fused else VLLM
  return Programs(
    verify=forward,
    grow=dataclasses.replace(forward, rest=forward.rest + _TREE_KERNELS),
    advance=Launches(layer=0, rest=_TREE_KERNELS),
  )


@functools.cache
def counted(weight_dtype: str | None, is_fused: bool) -> Programs:
  """Returns the kernels of our programs; all quantized dtypes have int4's."""
  return Programs(
    verify=_of_program('verify (greedy)', weight_dtype, is_fused),
    grow=_of_program('draft grow', weight_dtype, is_fused),
    advance=_of_program('draft advance', weight_dtype, is_fused),
  )


@functools.cache
def _rows() -> list[dict[str, Any]]:
  return [json.loads(line) for line in _COUNTED.read_text().splitlines()]


def _of_program(
  step: str, weight_dtype: str | None, is_fused: bool
) -> Launches:
  """Returns the kernels of a program, from its counts at two depths."""
  dtype = None if weight_dtype is None else 'int4'
  fewer, more = sorted(
    (
      row
      for row in _rows()
      if (row['step'], row['weight_dtype'], row['kernels'])
      == (step, dtype, is_fused)
    ),
    key=lambda row: row['num_layers'],
  )
  depth = more['num_layers'] - fewer['num_layers']
  kernels, all_reduces = (
    (more[name] - fewer[name]) / depth
    for name in ('num_kernels', 'num_all_reduces')
  )
  return Launches(
    layer=kernels - all_reduces,
    rest=fewer['num_kernels'] - fewer['num_layers'] * kernels,
  )
