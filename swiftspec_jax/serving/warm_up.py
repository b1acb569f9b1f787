"""Compiles all programs of an engine by running each of them once.

The steps are made up: their rows have slots and positions, and pages that
nobody gave them, so they must run before the first request.
"""

import jax
import numpy as np
import tqdm

from swiftspec_jax.serving import choices, step_input
from swiftspec_jax.serving.drafters import EngineDrafter
from swiftspec_jax.serving.flat_batch import FlatSizes
from swiftspec_jax.serving.program_sizes import ProgramSizes
from swiftspec_jax.serving.step_plan import StepPlan
from swiftspec_jax.serving.target import Target


def made_up_step(sizes: FlatSizes, longest: int) -> StepPlan | None:
  """Returns a step that needs these sizes, None if no step does.

  Args:
    sizes: of its program.
    longest: tokens of the longest row after the step; at most `context`.
  """
  rows = min(sizes.num_rows, sizes.num_tokens)
  if sizes.block_size > 1 and rows == sizes.num_tokens:
    rows -= 1  # otherwise it would be a plain step
  counts = np.full(rows, sizes.num_tokens // rows)
  counts[: sizes.num_tokens % rows] += 1
  if counts.max() > longest:
    return None
  return StepPlan(
    request_ids=np.arange(rows),
    slots=np.arange(rows),
    starts=longest - counts,
    num_query_tokens=counts,
    lengths=np.zeros_like(counts),
    is_sampled=np.ones(rows, bool),
    num_decoding=0,
    padded_rows=sizes.num_rows,
    padded_query_tokens=sizes.num_tokens,
  )


def run(
  sizes: ProgramSizes,
  target: Target,
  drafter: EngineDrafter,
  *,
  text_size: int,
  show_progress: bool,
) -> None:
  """Runs every program once.

  Args:
    sizes: declared.
    target: of the engine.
    drafter: of the engine.
    text_size: S, tokens of the longest text.
    show_progress: on standard error.
  """
  texts = np.zeros((sizes.scheduler.buckets.max_rows, text_size), np.int32)
  flat_sizes = [*sizes.all_plain(), *sizes.all_mixed()]
  steps = [
    made_up_step(flat, sizes.range_of(flat.context)[1]) for flat in flat_sizes
  ]
  num_draft_runs = drafter.num_programs(sizes)
  total = len(steps) + num_draft_runs
  with tqdm.tqdm(
    total=total, desc='compiling', unit='program', disable=not show_progress
  ) as progress:
    seen = set()
    for flat, step in zip(flat_sizes, steps, strict=True):
      progress.update()
      if step is None:
        continue
      # Verdicts know nothing of rows and contexts.
      kind = sizes.num_logits(flat), flat.block_size
      levels = [choices.Level.GREEDY] if kind in seen else choices.Level
      seen.add(kind)
      for level in levels:
        run_step(sizes, target, step, texts, level)
    for _ in drafter.warm_up(sizes, texts):
      progress.update()


def run_step(
  sizes: ProgramSizes,
  target: Target,
  step: StepPlan,
  texts: np.ndarray,
  level: choices.Level = choices.Level.GREEDY,
) -> None:
  """Runs a made-up step and reads its outcome, as the engine does."""
  buckets = sizes.scheduler.buckets
  packed = step_input.pack(
    sizes,
    step,
    texts,
    np.zeros(buckets.max_rows, np.int32),
    sizes.made_up_pages(),
  )
  output = target.dispatch(packed, *target.no_drafts, level, texts)
  jax.device_get(output)
