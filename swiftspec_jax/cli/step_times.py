"""How long one forward of the target and one of the draft takes, apart."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import swiftspec_jax as ss
from swiftspec_jax.drafters.trees import tree_draft
from swiftspec_jax.runtime import sharding
from swiftspec_jax.step import buckets

_NUM_TIMINGS = 8
_MAX_STEPS = 8  # of the draft in one timing


def enqueue_step(decoder: ss.Decoder, num_tokens: int = 1) -> Callable[[], Any]:
  """Returns a function that enqueues a step of the target; what it gives waits.

  Args:
    decoder: decoder that has decoded or was warmed up; what its rows hold is
      lost.
    num_tokens: tokens that the step verifies together.
  """
  engine = decoder.engine
  context = engine.max_context
  flat = engine.sizes.plain(1, context)
  if num_tokens > 1:
    flat = engine.sizes.mixed(1, num_tokens, context)
  return lambda: engine.enqueue_trial(flat, context // 2)[0]


def target_step_seconds(
  decoder: ss.Decoder, num_tokens: int = 1, num_timings: int = _NUM_TIMINGS
) -> float:
  """Returns the median time of a step of the target, which is waited for.

  Args:
    decoder: same as in `enqueue_step`.
    num_tokens: same as in `enqueue_step`.
    num_timings: steps to measure.
  """
  enqueue = enqueue_step(decoder, num_tokens)
  jax.block_until_ready(enqueue())  # compiles
  return _median(lambda: jax.block_until_ready(enqueue()), num_timings)


def draft_step_seconds(
  draft: ss.Model, tree: ss.TreeConfig, max_total_tokens: int
) -> float:
  """Returns the median time of an expansion.

  Args:
    draft: model that grows the tree.
    tree: sizes of the tree.
    max_total_tokens: tokens that the cache has room for.
  """
  num_steps = min(_MAX_STEPS, max(tree.num_cache_rows // tree.num_leaves, 1))
  steps = jax.device_put(np.int32(num_steps), sharding.replicated(draft.mesh))

  def start():
    state = tree_draft.init(
      draft.config,
      tree,
      draft.dtype,
      batch_size=1,
      capacity=buckets.power_of_two(max_total_tokens),
      mesh=draft.mesh,
    )
    return state.replace(is_busy=~state.is_busy)

  def grow(state):
    _, num_forwards = tree_draft.grow(
      draft.params, state, steps, config=draft.config, tree_config=tree
    )
    return int(num_forwards)

  num_forwards = grow(start())  # compiles
  states = [start() for _ in range(_NUM_TIMINGS)]
  jax.block_until_ready(states)
  return _median(lambda: grow(states.pop())) / num_forwards


def _median(run, num_timings: int = _NUM_TIMINGS) -> float:
  seconds = []
  for _ in range(num_timings):
    begin = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - begin)
  return statistics.median(seconds)
