"""The programs of steps of the serving engine.

Eight requests decode one token each (plain), or verify a draft of seven tokens
besides (chain, tree). Their keys and values lie in pages, or each has a row.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.aot.rows import Job
from experiments.aot.targets import Target
from swiftspec_jax import sharding
from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig, SamplingParams
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.model import Model
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step import (
  ahead_of_time,
  slot_sampling,
  slot_trees,
  step_input,
  target_forward,
  target_programs,
  verify,
)
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.rows import Rows

_DTYPE = jnp.bfloat16
_NUM_ROWS = 8
_NUM_NODES = 8  # the last known token and its draft
_CONTEXT = 1024
_PAGE_SIZE = 16
_BUCKETS = StepBuckets(
  rows=(_NUM_ROWS,),
  query_tokens=(_NUM_ROWS * _NUM_NODES, _CONTEXT),
  lengths=(0, _NUM_NODES - 1),
)
_LAYOUTS = {
  'pages': ProgramSizes(
    scheduler=SchedulerConfig(
      buckets=_BUCKETS,
      num_pages=_NUM_ROWS * _CONTEXT // _PAGE_SIZE,
      max_context=_CONTEXT,
      page_size=_PAGE_SIZE,
    ),
    contexts=(_CONTEXT,),
  ),
  'rows': ProgramSizes.of_rows(_BUCKETS, _CONTEXT),
}
_KINDS = 'plain', 'chain', 'tree'
# Of pages the parts of a step are programs of their own.
_PROGRAMS = {
  'pages': {
    'plain': ('forward', 'verdict'),
    'chain': ('forward', 'verdict'),
    'tree': ('forward', 'verdict', 'commit'),
  },
  'rows': dict.fromkeys(_KINDS, ('step',)),
}
NAMES = tuple(
  f'served {kind}, {layout}: {program}'
  for layout, programs in _PROGRAMS.items()
  for kind in _KINDS
  for program in programs[kind]
)


def jobs(
  config: ModelConfig, shape: str, num_devices: int, target: Target
) -> Iterator[Job]:
  """Yields the programs of `NAMES`.

  Args:
    config: target of the engine.
    shape: model in words.
    num_devices: devices that share it.
    target: devices to compile for.
  """
  for name in NAMES:
    step, program = name.split(': ')
    kind, layout = step.removeprefix('served ').split(', ')
    yield Job(
      name=name,
      shape=shape,
      target=target,
      lower=functools.partial(
        _lower, program, kind, layout, config, num_devices, target
      ),
    )


def _lower(program, kind, layout, config, num_devices, target):
  step = Step(
    kind=kind,
    sizes=_LAYOUTS[layout],
    config=dataclasses.replace(config, num_shards=num_devices),
    mesh=sharding.make_mesh(target.devices[:num_devices]),
  )
  return getattr(step, program)()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
  """A step in the words of `Target.dispatch`, with abstract arrays.

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

  def step(self) -> jax.stages.Lowered:
    """Returns the whole step, of rows of the cache."""
    args, options = self._forward()
    chains = self._integers(self._num_rows, self._num_nodes - 1)
    trees = None
    if self.kind == 'tree':
      trees = self._integers(self._num_rows, 5 * self._num_nodes + 3)
    return target_programs.run_step.lower(
      *args[:4],
      chains,
      trees,
      None,
      self._sampling,
      level=slot_sampling.level_of(self.sampling),
      sharding=sharding.replicated(self.mesh),
      **options,
    )

  @property
  def _num_rows(self) -> int:
    return self.sizes.scheduler.buckets.max_rows

  @property
  def _num_nodes(self) -> int:
    return self.sizes.scheduler.buckets.max_length + 1

  @property
  def _sampling(self) -> sampling_lib.SamplingState:
    state = slot_sampling.make_state(
      [self.sampling] * self._num_rows,
      self.config.vocab_size,
      slot_sampling.level_of(self.sampling),
    )
    return self._placed(state)

  def forward(self) -> jax.stages.Lowered:
    """Returns the target's forward."""
    args, options = self._forward()
    return target_programs.query_logits.lower(*args, **options)

  def verdict(self) -> jax.stages.Lowered:
    """Returns the choice of the tokens that stand."""
    args, options = self._verdict()
    return verify.verify.lower(*args, **options)

  def commit(self) -> jax.stages.Lowered:
    """Returns the move of accepted nodes."""
    args, options = self._verdict()
    packed = ahead_of_time.compile_only(verify.verify, *args, **options)[1]
    cache, *_, places = self._forwarded
    return target_programs.commit_nodes.lower(
      cache, places, packed, kernels=self.config.kernels
    )

  def _forward(self):
    """Returns the arguments of `query_logits`."""
    context = self.sizes.contexts[-1]
    flat = self.sizes.plain(self._num_rows, context)
    if self.kind != 'plain':
      num_tokens = self._num_rows * self._num_nodes
      flat = self.sizes.mixed(self._num_rows, num_tokens, context)
    columns = 0
    if not self.sizes.has_rows:
      columns = context // self.sizes.scheduler.page_size
    args = (
      params_lib.abstract_params(self.config, _DTYPE, self.mesh),
      self._cache(),
      self._integers(self._num_rows, step_input.NUM_COUNTS + columns),
      self._rows,
      self._drafted,
      self._trees,
      None,
    )
    options = {
      'config': self.config,
      'flat': flat,
      'num_queries': self.sizes.num_logits(flat),
    }
    return args, options

  @functools.cached_property
  def _forwarded(self):
    """What the forward returns, where it leaves it."""
    args, options = self._forward()
    return ahead_of_time.compile_only(
      target_programs.query_logits, *args, **options
    )

  def _verdict(self):
    """Returns the arguments of `verify`."""
    _, logits, token_ids, queries, _ = self._forwarded
    args = (
      logits,
      None,
      token_ids,
      queries,
      self._drafted,
      self._sampling,
      self._rows,
      self._trees,
    )
    options = {
      'reads_texts': False,
      'kernels': self.config.kernels,
      'sharding': sharding.replicated(self.mesh),
    }
    return args, options

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
      name: self._placed(getattr(cache, name), cache.sharding)
      for name in ('keys', 'values')
    }
    if isinstance(cache, dense.KVCache):
      stored['kv_lengths'] = self._placed(cache.kv_lengths)
    return cache.replace(**stored)

  @property
  def _rows(self) -> Rows:
    of_rows = self._integers(self._num_rows)
    max_context = self.sizes.scheduler.max_context
    return Rows(
      token_ids=self._integers(self._num_rows, max_context),
      lengths=of_rows,
      prompt_lengths=of_rows,
      max_lengths=of_rows,
    )

  @property
  def _drafted(self) -> jax.ShapeDtypeStruct:
    return self._integers(self._num_rows, self._num_nodes - 1)

  @property
  def _trees(self) -> slot_trees.SlotTrees | None:
    if self.kind != 'tree':
      return None
    packed = self._integers(self._num_rows, 5 * self._num_nodes + 3)
    return self._placed(jax.eval_shape(slot_trees.of_proposal, packed)[1])

  def _integers(self, *shape: int) -> jax.ShapeDtypeStruct:
    return self._placed(jax.ShapeDtypeStruct(shape, jnp.int32))

  def _placed(self, tree: Any, where: Any = None) -> Any:
    """Returns abstract arrays, by default each whole on all devices."""
    where = where or sharding.replicated(self.mesh)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
    )
