"""The whole sharded steps of a pair: verify, decode, grow, advance.

Their arrays are abstract.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.aot.models import Pair
from experiments.aot.rows import Job
from experiments.aot.targets import Target
from swiftspec_jax.config import ModelConfig, SamplingParams, TreeConfig
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import (
  ahead_of_time,
  buckets,
  program_sizes,
  slot_sampling,
  step_input,
  target_forward,
  target_programs,
)
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.rows import Rows

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
  """Yields the steps of these names, or all, at each split of the target."""
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
  yield 'draft grow', functools.partial(_draft, tree_draft.grow, *options)
  yield 'draft advance', functools.partial(_draft, tree_draft.advance, *options)


def _step(kind, config, num_nodes, num_devices, target, params):
  """Lowers a step of one request, whose keys and values have a row."""
  buckets_of_row = StepBuckets(
    rows=(1,),
    query_tokens=(1, num_nodes, _CONTEXT),
    lengths=tuple(range(num_nodes)),
  )
  config, mesh = _place(config, target.devices[:num_devices])
  least_tokens = program_sizes.least_tokens(mesh, 1)
  return Step(
    kind=kind,
    sizes=ProgramSizes.of_rows(buckets_of_row, _CONTEXT, least_tokens),
    config=config,
    mesh=mesh,
    sampling=params,
  ).lower()


def _draft(fn, config, tree: TreeConfig, split, target):
  """Lowers a step of the draft."""
  config, mesh = _place(config, target.devices[split[0] : sum(split)])
  number = _integers(mesh)
  args, options = [number], {}
  if fn is tree_draft.advance:
    args = [_integers(mesh, 1, tree.num_nodes + 1), number, number]
    options = {'num_nodes': tree.num_nodes}
  return fn.lower(
    params_lib.abstract_params(config, _DTYPE, mesh),
    _draft_state(config, tree, mesh),
    *args,
    config=config,
    tree_config=tree,
    **options,
  )


def _place(config: ModelConfig, devices) -> tuple[ModelConfig, Mesh]:
  config = dataclasses.replace(config, num_shards=len(devices))
  return config, sharding.make_mesh(devices)


def _integers(mesh: Mesh, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding.replicated(mesh)
  )


def _draft_state(config, tree, mesh) -> tree_draft.TreeDraftState:
  """Returns abstract arrays: those of a cache sharded, the others whole."""
  rows = sharding.sharding_of(mesh, ('batch', 'kv_heads', None, None))

  def place(x):
    where = rows if x.ndim == 4 else sharding.replicated(mesh)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  init = functools.partial(
    tree_draft.init,
    config,
    tree,
    _DTYPE,
    batch_size=1,
    capacity=_CAPACITY,
    mesh=mesh,
  )
  return jax.tree.map(place, jax.eval_shape(init))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A step of the serving engine, in the words of `Target.dispatch`.

  Attributes:
    kind: 'plain', 'chain' or 'tree'.
    sizes: declared, with one number of rows.
    config: target of the engine.
    mesh: devices of the target.
    sampling: parameters of all requests.
  """

  kind: str
  sizes: ProgramSizes
  config: ModelConfig
  mesh: Mesh
  sampling: SamplingParams = SamplingParams()

  def lower(self) -> jax.stages.Lowered:
    """Returns the whole step, of rows of the cache."""
    args, options = self.arguments()
    return target_programs.run_step.lower(*args, **options)

  def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns those of `target_programs.run_step`."""
    config = self.sizes.scheduler
    num_rows, num_nodes = config.buckets.max_rows, config.buckets.max_length + 1
    context = self.sizes.contexts[-1]
    flat = self.sizes.plain(num_rows, context)
    if self.kind != 'plain':
      flat = self.sizes.mixed(num_rows, num_rows * num_nodes, context)
    columns = step_input.NUM_COUNTS
    if not self.sizes.has_rows:
      columns += context // config.page_size
    level = slot_sampling.level_of(self.sampling)
    state = sampling_lib.make_state(
      [self.sampling] * num_rows, self.config.vocab_size, level
    )
    integers = functools.partial(_integers, self.mesh)
    trees = None
    if self.kind == 'tree':
      trees = integers(num_rows, 5 * num_nodes + 3)
    args = (
      params_lib.abstract_params(self.config, _DTYPE, self.mesh),
      self._cache(),
      integers(num_rows, columns),
      Rows(
        token_ids=integers(num_rows, config.max_context),
        **dict.fromkeys(
          ('lengths', 'prompt_lengths', 'max_lengths'), integers(num_rows)
        ),
      ),
      integers(num_rows, num_nodes - 1),
      trees,
      self._whole(state),
    )
    return args, {
      'config': self.config,
      'flat': flat,
      'num_queries': self.sizes.num_logits(flat),
      'level': level,
      'sharding': sharding.replicated(self.mesh),
    }

  def _cache(self) -> target_forward.Cache:
    model = Model(
      name='abstract',
      config=self.config,
      params=None,
      dtype=_DTYPE,
      mesh=self.mesh,
      tokenizer=None,
    )
    cache = jax.eval_shape(
      functools.partial(target_forward.init_cache, model, self.sizes)
    )
    stored = {
      name: ahead_of_time.abstract(getattr(cache, name), cache.sharding)
      for name in ('keys', 'values')
    }
    if isinstance(cache, dense.KVCache):
      stored['kv_lengths'] = self._whole(cache.kv_lengths)
    return cache.replace(**stored)

  def _whole(self, tree: Any) -> Any:
    """Returns abstract arrays, each whole on all devices."""
    return ahead_of_time.abstract(tree, sharding.replicated(self.mesh))
