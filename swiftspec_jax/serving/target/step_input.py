"""From the plan of a step to what the target is fed.

Legend: R rows, N tokens, M queries, B slots, S tokens of the longest text,
K longest draft, T = K + 1, or 1 in a plain step.
"""

import jax
import numpy as np
from flax import struct

from swiftspec_jax.serving.compilation.program_sizes import ProgramSizes
from swiftspec_jax.serving.scheduling.step_plan import StepPlan
from swiftspec_jax.serving.target import choices, flat_batch
from swiftspec_jax.serving.target.flat_batch import FlatBatch, FlatSizes


@struct.dataclass(frozen=True, kw_only=True)
class StepInput:
  """Host arrays of a step."""

  batch: FlatBatch
  token_ids: jax.Array  # i32[N] known tokens; anything where there is a draft
  draft_index: jax.Array  # i32[N] of B * K draft tokens, -1 for known tokens
  query_index: jax.Array  # i32[M] queries, among the N tokens
  queries: choices.Queries


def pack(
  sizes: ProgramSizes,
  flat: FlatSizes,
  step: StepPlan,
  texts: np.ndarray,
  prompt_lengths: np.ndarray,
  page_table: np.ndarray,
) -> StepInput:
  """Returns the input of a step.

  Args:
    sizes: declared.
    flat: sizes of the program that runs it, at least its own `flat_sizes`.
    step: step that it runs.
    texts: i32[B, S] known tokens of the slots.
    prompt_lengths: i32[B].
    page_table: i32[B, any].
  """
  counts, config = step.num_query_tokens, sizes.scheduler
  rows = np.repeat(np.arange(len(counts)), counts)
  # Counted from the last known token: the root is 0, drafts are 1 and more.
  offsets = np.arange(len(rows)) - (np.cumsum(counts) - 1)[rows]
  offsets += step.lengths[rows]
  slots = step.slots[rows]
  positions = offsets + (step.starts + counts - 1 - step.lengths)[rows]
  draft_index = slots * config.buckets.max_length + offsets - 1
  is_query = step.is_sampled[rows] & (offsets >= 0)
  return StepInput(
    batch=flat_batch.pack(
      flat,
      step.starts,
      counts,
      page_table[step.slots],
      config.page_size,
      config.num_pages,
    ),
    token_ids=_padded(texts[slots, positions], flat.num_tokens, 0),
    draft_index=_padded(
      np.where(offsets > 0, draft_index, -1), flat.num_tokens, -1
    ),
    query_index=_padded(np.flatnonzero(is_query), sizes.num_logits(flat), 0),
    queries=_queries(
      sizes,
      flat,
      step,
      slots[is_query],
      positions[is_query],
      offsets[is_query],
      prompt_lengths,
      texts.shape[1],
    ),
  )


def flat_sizes(sizes: ProgramSizes, step: StepPlan) -> FlatSizes:
  """Returns the declared sizes for a step."""
  longest = int((step.starts + step.num_query_tokens).max())
  if step.num_query_tokens.max() == 1:
    return sizes.plain(step.padded_rows, longest)
  return sizes.mixed(step.padded_rows, step.padded_query_tokens, longest)


def _queries(
  sizes: ProgramSizes,
  flat: FlatSizes,
  step: StepPlan,
  slots: np.ndarray,
  positions: np.ndarray,
  offsets: np.ndarray,
  prompt_lengths: np.ndarray,
  text_size: int,
) -> choices.Queries:
  num_queries, num_slots = sizes.num_logits(flat), len(prompt_lengths)
  length = 0 if flat.block_size == 1 else sizes.scheduler.buckets.max_length
  index = np.zeros((num_slots, length + 1), np.int32)
  index[slots, offsets] = np.arange(len(slots))
  num_drafted = np.zeros(num_slots, np.int32)
  num_drafted[step.slots] = step.lengths
  return choices.Queries(
    slots=_padded(slots, num_queries, 0),
    # Padding stands behind the end of every text.
    positions=_padded(positions + 1, num_queries, text_size + 1)[:, None],
    index=index,
    num_drafted=num_drafted,
    prompt_lengths=prompt_lengths,
  )


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
  padded = np.full(size, fill, np.int32)
  padded[: len(values)] = values
  return padded
