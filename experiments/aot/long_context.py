"""Steps of the serving engine over one long text that devices share."""

import dataclasses
import functools
from collections.abc import Iterator

from configs import models
from experiments.aot.rows import Job
from experiments.aot.served_steps import Step
from experiments.aot.targets import Target
from swiftspec_jax import sharding
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes

_CONTEXT = 131_072
_NUM_DEVICES = 8
# Devices that share tokens, by model. The first model has a kv head for each
# device, the second has two.
_SPLITS = {
  'llama-8b': (models.LLAMA_8B, (1, 2, 8)),
  'qwen2-1.5b': (models.QWEN2_1B5, (1, 4)),
}
_NUM_NODES = 16


def jobs(target: Target) -> Iterator[Job]:
  """Yields the forwards of each model at each split."""
  for name, (config, splits) in _SPLITS.items():
    for split in splits:
      for kind in ('plain', 'tree'):
        yield Job(
          name=f'long {kind}',
          shape=f'{name}, {_CONTEXT} tokens, {split} of {_NUM_DEVICES} '
          'devices share tokens',
          target=target,
          lower=functools.partial(_lower, config, split, target, kind),
        )


def _lower(*step):
  return step_of(*step).parts()['query_logits']


def step_of(
  config: ModelConfig,
  split: int,
  target: Target,
  kind: str,
  context: int = _CONTEXT,
) -> Step:
  """Returns a step of one row, `kind` as in `Step`."""
  page_size = 16 * split
  buckets = StepBuckets(
    rows=(1,), query_tokens=(_NUM_NODES, context), lengths=(0, _NUM_NODES - 1)
  )
  scheduler = SchedulerConfig(
    buckets=buckets,
    num_pages=context // page_size,
    max_context=context,
    page_size=page_size,
  )
  return Step(
    kind=kind,
    sizes=ProgramSizes(scheduler=scheduler, contexts=(context,)),
    config=dataclasses.replace(
      config, num_shards=_NUM_DEVICES, num_sequence_shards=split
    ),
    mesh=sharding.make_mesh(target.devices[:_NUM_DEVICES], split),
  )
