"""A step of the serving engine with abstract arrays, to be compiled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftspec_jax.config import ModelConfig, SamplingParams
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.cache import dense
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import (
  ahead_of_time,
  slot_sampling,
  step_input,
  target_forward,
  target_programs,
)
from swiftspec_jax.step import sampling as sampling_lib
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.rows import Rows

_DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
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

  def lower(self) -> jax.stages.Lowered:
    """Returns the whole step, of rows of the cache."""
    args, options = self.arguments()
    return target_programs.run_step.lower(*args, **options)

  def parts(self) -> dict[str, jax.stages.Lowered]:
    """Returns the programs of a step over pages, by their functions."""
    found = {}

    def call(fn, *args, **options):
      found[fn.__name__] = fn.lower(*args, **options)
      return ahead_of_time.compile_only(fn, *args, **options)

    args, options = self.arguments()
    target_programs.run_parts(call, *args, **options)
    return found

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
    trees = None
    if self.kind == 'tree':
      trees = self._integers(num_rows, 5 * num_nodes + 3)
    args = (
      params_lib.abstract_params(self.config, _DTYPE, self.mesh),
      self._cache(),
      self._integers(num_rows, columns),
      Rows(
        token_ids=self._integers(num_rows, config.max_context),
        **dict.fromkeys(
          ('lengths', 'prompt_lengths', 'max_lengths'), self._integers(num_rows)
        ),
      ),
      self._integers(num_rows, num_nodes - 1),
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

  def _integers(self, *shape: int) -> jax.ShapeDtypeStruct:
    return self._whole(jax.ShapeDtypeStruct(shape, jnp.int32))

  def _whole(self, tree: Any) -> Any:
    """Returns abstract arrays, each whole on all devices."""
    return ahead_of_time.abstract(tree, sharding.replicated(self.mesh))
