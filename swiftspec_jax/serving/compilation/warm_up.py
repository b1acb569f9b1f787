"""Invented steps, to compile the programs of the target or to measure them.

Their rows have slots and positions, and pages that nobody gave them, so no
target must run them while there are requests.
"""

import jax
import numpy as np

from swiftspec_jax.scheduling.step_plan import StepPlan
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


def run_step(
  sizes: ProgramSizes,
  target: Target,
  flat: StepSizes,
  step: StepPlan,
  level: slot_sampling.SamplingLevel = slot_sampling.SamplingLevel.GREEDY,
) -> None:
  """Runs an invented step and waits for its outcome, as the engine does.

  Args:
    sizes: declared.
    target: target that runs the step, or compiles its programs.
    flat: sizes of the program.
    step: step that fits into it.
    level: level of sampling.
  """
  packed = step_input.pack(sizes, flat, step, sizes.made_up_pages())
  output = target.dispatch(packed, flat, *target.no_drafts, level)
  jax.block_until_ready(output)
