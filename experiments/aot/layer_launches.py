"""Counts the kernels of the steps of a round.

Llama-3-70B and 3B are cut to two depths. What the programs differ by is what a
layer starts; sizes do not matter, as a kernel of any size is one kernel.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from configs import models
from experiments.aot import launches, steps
from experiments.aot.models import Pair
from experiments.aot.rows import Job, Row
from experiments.aot.targets import Target
from swiftspec_jax.config import ModelConfig, TreeConfig

# Steps of a round, and the part of each program that runs: a verification; an
# expansion of the tree; what follows a verdict where no forward is missing.
PARTS = {
  'verify (greedy)': launches.ONCE,
  'draft grow': 'jit(grow)/grow/while',
  'draft advance': launches.ONCE,
}
_DEPTHS = 2, 4
_SPLIT = 4, 4
_TREE = TreeConfig(prompt_lookup=False)  # as plans have it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Variant:
  weight_dtype: str | None
  kernels: bool
  num_layers: int

  @property
  def name(self) -> str:
    weights = self.weight_dtype or 'bfloat16'
    kernels = 'kernels' if self.kernels else 'no kernels'
    return f'{self.num_layers} layers, {weights}, {kernels}'

  def cut(self, config: ModelConfig) -> ModelConfig:
    """Returns a model with these layers, weights and kernels."""
    return dataclasses.replace(
      config.with_layers(self.num_layers),
      weight_dtype=self.weight_dtype,
      kernels='auto' if self.kernels else 'reference',
    )


@functools.cache
def _variants() -> dict[str, _Variant]:
  """Returns what is compiled, by the shape of its rows."""
  found = [
    _Variant(weight_dtype=dtype, kernels=kernels, num_layers=depth)
    for dtype, kernels, depth in itertools.product(
      (None, 'int4'), (False, True), _DEPTHS
    )
  ]
  return {f'{x.name} {_SPLIT[0]}+{_SPLIT[1]}': x for x in found}


def jobs(target: Target) -> Iterator[Job]:
  """Yields the steps of both depths, with and without kernels."""
  for variant in _variants().values():
    pair = Pair(
      name=variant.name,
      target=variant.cut(models.LLAMA_70B),
      draft=variant.cut(models.LLAMA_3B),
      splits=(_SPLIT,),
      tree=_TREE,
    )
    yield from steps.jobs(pair, target, names=PARTS)


def table(done: Iterable[Row]) -> list[dict[str, Any]]:
  """Returns the counts of the rows that are of these jobs, for GPUs."""
  return [
    {
      'step': row.name,
      **dataclasses.asdict(_variants()[row.shape]),
      **row.launches[PARTS[row.name]],
    }
    for row in done
    if row.shape in _variants() and row.launches is not None
  ]
