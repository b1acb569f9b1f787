"""Steps of the serving engine over one long text that devices share."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import models
from experiments.aot.rows import Job
from experiments.aot.targets import Target
from swiftspec_jax import sharding
from swiftspec_jax.cache import paged
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.step import ragged_batch, target_forward
from swiftspec_jax.step.ragged_batch import StepSizes

_CONTEXT = 131_072
_DTYPE = jnp.bfloat16
_NUM_DEVICES = 8
# Devices that share tokens, by model. The first model has a kv head for each
# device, the second has two.
_SPLITS = {
  'llama-8b': (models.LLAMA_8B, (1, 2, 8)),
  'qwen2-1.5b': (models.QWEN2_1B5, (1, 4)),
}
_NUM_QUERIES = 16  # tokens whose logits are wanted
# Tokens of a step, and of its blocks.
STEPS = {'decode': (1, 1), 'tree': (16, 16), 'prompt': (64, 16)}


def jobs(target: Target) -> Iterator[Job]:
  """Yields the steps of each model at each split."""
  for name, (config, splits) in _SPLITS.items():
    for split in splits:
      for step, sizes in STEPS.items():
        yield Job(
          name=f'long {step}',
          shape=f'{name}, {_CONTEXT} tokens, {split} of {_NUM_DEVICES} '
          'devices share tokens',
          target=target,
          lower=functools.partial(lower, config, split, target, *sizes),
        )


def lower(
  config: ModelConfig,
  split: int,
  target: Target,
  num_tokens: int,
  block_size: int,
  context: int = _CONTEXT,
) -> jax.stages.Lowered:
  """Returns a step of one row, with the move of accepted nodes."""
  mesh = sharding.make_mesh(target.devices[:_NUM_DEVICES], split)
  config = dataclasses.replace(
    config, num_shards=mesh.size, num_sequence_shards=split
  )
  page_size = 16 * split
  num_pages = context // page_size
  batch = ragged_batch.pack(
    StepSizes(
      num_rows=1, num_tokens=num_tokens, block_size=block_size, context=context
    ),
    np.array([context - num_tokens]),
    np.array([num_tokens]),
    np.arange(num_pages, dtype=np.int32)[None],
    page_size,
    num_pages,
  )
  if block_size > 1:
    shape = (len(batch.block_pages), block_size, block_size)
    batch = batch.replace(block_mask=np.ones(shape, bool))
  places = np.zeros(num_tokens, np.int32)
  init = functools.partial(
    paged.init, config, num_pages, page_size, _DTYPE, mesh
  )
  cache = jax.eval_shape(init)
  cache = cache.replace(
    keys=_placed(cache.keys, cache.sharding),
    values=_placed(cache.values, cache.sharding),
  )
  step = functools.partial(_step, config=config)
  return jax.jit(step, donate_argnums=1).lower(
    params_lib.abstract_params(config, _DTYPE, mesh),
    cache,
    *_placed((places, batch, places, places), sharding.replicated(mesh)),
  )


def _step(params, cache, token_ids, batch, sources, targets, *, config):
  hidden, cache = target_forward.forward(
    params, config, token_ids, batch, cache
  )
  queries = hidden[-_NUM_QUERIES:]
  logits = target_forward.logits_of(params, config, queries)
  return paged.move(cache, sources, targets), logits


def _placed(tree: Any, where: jax.sharding.Sharding) -> Any:
  """Returns abstract arrays with one sharding."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
  )
