"""Invented steps, to compile the programs of the target or to measure them.

Their rows have slots and positions, and pages that nobody gave them, so no
target must run them while there are requests.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.drafters.device_drafter import DeviceDrafter
from swiftspec_jax.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.scheduling.step_plan import StepPlan
from swiftspec_jax.step import slot_sampling, step_input
from swiftspec_jax.step.program_sizes import ProgramSizes
from swiftspec_jax.step.ragged_batch import StepSizes
from swiftspec_jax.step.slot_drafts import Search, SlotDrafts
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


def searches(
  flat: StepSizes, drafters: Sequence[EngineDrafter]
) -> list[tuple[Search | None, int]]:
  """Returns `search` and `least_found` of `run_step` that run all of a program.

  Args:
    flat: sizes of the program.
    drafters: drafters of the engine.
  """
  found: list[tuple[Search | None, int]] = []
  for drafter in drafters:
    if flat.has_draft_blocks and isinstance(drafter, DeviceDrafter):
      found += [(drafter.search(), 0), (drafter.search(), 1)]
    elif not found:
      found.append((None, 0))
  return found


def run_step(
  sizes: ProgramSizes,
  target: Target,
  flat: StepSizes,
  step: StepPlan,
  level: slot_sampling.SamplingLevel = slot_sampling.SamplingLevel.GREEDY,
  search: Search | None = None,
  least_found: int = 0,
  *,
  has_grammar: bool = False,
) -> Any:
  """Enqueues an invented step as the engine does; returns its outcome.

  Args:
    sizes: declared.
    target: target that runs the step, or compiles its programs.
    flat: sizes of the program.
    step: step that fits into it.
    level: level of sampling.
    search: lookup that it does.
    least_found: tokens that this finds at least.
    has_grammar: whether an output of the step follows a grammar.
  """
  packed = step_input.pack(sizes, flat, step, sizes.made_up_pages())
  drafts = None
  if search is not None:
    nothing = policies.Drafts(lengths=np.zeros(0, np.int64))
    drafts = SlotDrafts(drafts=nothing, search=search)
  find_masks = functools.partial(target.no_masks, flat) if has_grammar else None
  return target.dispatch(packed, flat, drafts, level, least_found, find_masks)
