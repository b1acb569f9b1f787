"""The whole sharded steps of a pair: verify, decode, grow, advance."""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.aot import served_steps
from experiments.aot.models import Pair
from experiments.aot.rows import Job
from experiments.aot.targets import Target
from swiftspec_jax.config import ModelConfig, SamplingParams, TreeConfig
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import buckets, program_sizes
from swiftspec_jax.step.program_sizes import ProgramSizes

_DTYPE = jnp.bfloat16
_CONTEXT = buckets.power_of_two(1_000)
_CAPACITY = _CONTEXT + 16  # of the draft
_SAMPLING = {
  'greedy': SamplingParams(),
  'top-p': SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
}


def jobs(
  pair: Pair, target: Target, names: Collection[str] | None = None
) -> Iterator[Job]:
  """Yields the steps of a pair at each split that the target has.

  Args:
    pair: target and draft.
    target: devices to compile for.
    names: names of the steps; None for all.
  """
  for split in pair.splits:
    if not set(split) <= {0, *target.sizes}:
      continue
    for name, lower in _steps(pair, split, target):
      if names is not None and name not in names:
        continue
      yield Job(
        name=name,
        shape=f'{pair.name} {split[0]}+{split[1]}',
        target=target,
        lower=lower,
      )


def _steps(pair, split, target):
  """Yields names of steps and functions that lower them."""
  for name, params in _SAMPLING.items():
    options = (pair.target, pair.tree.num_nodes, split[0], target, params)
    yield f'verify ({name})', functools.partial(_step, 'tree', *options)
    yield f'decode ({name})', functools.partial(_step, 'plain', *options)
  if pair.draft is None:
    return
  options = (pair.draft, pair.tree, split, target)
  yield 'draft grow', functools.partial(_grow, *options)
  yield 'draft advance', functools.partial(_advance, *options)


def _step(kind, config, num_nodes, num_devices, target, params):
  """Lowers a step of one request, whose keys and values have a row."""
  buckets_of_row = StepBuckets(
    rows=(1,),
    query_tokens=(1, num_nodes, _CONTEXT),
    lengths=tuple(range(num_nodes)),
  )
  config, mesh = _place(config, target.devices[:num_devices])
  least_tokens = program_sizes.least_tokens(mesh, 1)
  return served_steps.Step(
    kind=kind,
    sizes=ProgramSizes.of_rows(buckets_of_row, _CONTEXT, least_tokens),
    config=config,
    mesh=mesh,
    sampling=params,
  ).lower()


def _grow(config, tree: TreeConfig, split, target):
  config, mesh = _place(config, target.devices[split[0] : sum(split)])
  return tree_draft.grow.lower(
    params_lib.abstract_params(config, _DTYPE, mesh),
    _draft_state(config, tree, mesh),
    _integers(mesh),
    config=config,
    tree_config=tree,
  )


def _advance(config, tree: TreeConfig, split, target):
  config, mesh = _place(config, target.devices[split[0] : sum(split)])
  return tree_draft.advance.lower(
    params_lib.abstract_params(config, _DTYPE, mesh),
    _draft_state(config, tree, mesh),
    _integers(mesh, 1, tree.num_nodes + 1),
    _integers(mesh),
    _integers(mesh),
    config=config,
    tree_config=tree,
    num_nodes=tree.num_nodes,
  )


def _place(config: ModelConfig, devices) -> tuple[ModelConfig, Mesh]:
  config = dataclasses.replace(config, num_shards=len(devices))
  return config, sharding.make_mesh(devices)


def _integers(mesh: Mesh, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding.replicated(mesh)
  )


def _draft_state(config, tree, mesh) -> tree_draft.TreeDraftState:
  init = functools.partial(
    tree_draft.init,
    config,
    tree,
    _DTYPE,
    batch_size=1,
    capacity=_CAPACITY,
    mesh=mesh,
  )
  return _on_mesh(jax.eval_shape(init), mesh)


def _on_mesh(tree: Any, mesh: Mesh) -> Any:
  """Returns abstract arrays: those of a cache sharded, the others whole."""
  rows = sharding.sharding_of(mesh, ('batch', 'kv_heads', None, None))

  def place(x):
    where = rows if x.ndim == 4 else sharding.replicated(mesh)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  return jax.tree.map(place, tree)
