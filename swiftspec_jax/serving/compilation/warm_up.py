"""Invented steps, to compile the programs of the target or to measure them.

Their rows have slots and positions, and pages that nobody gave them, so no
target must run them while there are requests.
"""

from typing import Any

import numpy as np

from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.serving.drafters.device_drafter import DeviceDrafter
from swiftspec_jax.serving.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.step import slot_sampling, step_input
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.target import Target


def made_up_step(sizes: StepSizes, longest: int) -> StepPlan:
  """Returns a step that fills a program as far as it can.

  Args:
    sizes: sizes of the program.
    longest: tokens of the longest row after the step; at most `context`.
  """
  rows = min(sizes.num_rows, sizes.num_tokens)
  counts = np.full(rows, sizes.num_tokens // rows)
  counts[: sizes.num_tokens % rows] += 1
  counts = np.minimum(counts, longest)
  return StepPlan(
    request_ids=np.arange(rows),
    slots=np.arange(rows),
    starts=longest - counts,
    num_query_tokens=counts,
    lengths=np.zeros_like(counts),
    is_sampled=np.ones(rows, bool),
    num_ahead=np.zeros_like(counts),
    num_decoding=0,
    shape=(rows, int(counts.sum())),
    padded_rows=sizes.num_rows,
    padded_query_tokens=sizes.num_tokens,
  )


def numbers_found(
  flat: StepSizes, drafter: EngineDrafter
) -> tuple[int | None, ...]:
  """Returns the `num_found` of `run_step` that try all of a program."""
  if flat.has_draft_blocks and isinstance(drafter, DeviceDrafter):
    return 0, 1
  return (None,)


def run_step(
  sizes: ProgramSizes,
  target: Target,
  flat: StepSizes,
  step: StepPlan,
  level: slot_sampling.SamplingLevel = slot_sampling.SamplingLevel.GREEDY,
  num_found: int | None = None,
) -> Any:
  """Enqueues an invented step as the engine does; returns its outcome.

  Args:
    sizes: declared.
    target: target that runs the step, or compiles its programs.
    flat: sizes of the program.
    step: step that fits into it.
    level: level of sampling.
    num_found: draft tokens of each slot, where the devices alone know them.
  """
  packed = step_input.pack(sizes, flat, step, sizes.made_up_pages())
  found = None
  if num_found is not None:
    num_slots = sizes.scheduler.buckets.max_rows
    found = target.put(np.full(num_slots, num_found, np.int32))
  return target.dispatch(packed, flat, *target.no_drafts, level, found)
