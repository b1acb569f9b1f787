"""How long one forward of the target and one of the draft takes, apart."""

import statistics
import time

import jax
import numpy as np

import swiftspec_jax as ss
from swiftspec_jax import buckets, sharding
from swiftspec_jax.drafting.trees import tree_draft

_NUM_TIMINGS = 8
_MAX_STEPS = 8  # of the draft in one timing


def target_step_seconds(decoder: ss.Decoder) -> float:
  """Returns the median time of a verification.

  Args:
    decoder: decoder with a tree; its rows may be idle, and are lost.
  """
  jax.block_until_ready(decoder.dispatch())
  return _median(lambda: jax.block_until_ready(decoder.pipeline.verify()))


def round_seconds(decoder: ss.Decoder) -> float:
  """Returns the median time of a round; in plain decoding a target step.

  Args:
    decoder: decoder whose rows may be idle; what they hold is lost.
  """
  jax.block_until_ready(decoder.dispatch())
  return _median(lambda: jax.block_until_ready(decoder.dispatch()))


def draft_step_seconds(
  draft: ss.Model, tree: ss.TreeConfig, max_total_tokens: int
) -> float:
  """Returns the median time of an expansion.

  Args:
    draft: model that grows the tree.
    tree: sizes of the tree.
    max_total_tokens: tokens that the cache has room for.
  """
  num_steps = min(_MAX_STEPS, max(tree.num_cache_rows // tree.width, 1))
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


def _median(run) -> float:
  seconds = []
  for _ in range(_NUM_TIMINGS):
    begin = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - begin)
  return statistics.median(seconds)
