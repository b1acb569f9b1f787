"""Plans as lines of files, and as flags."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.deployment import Deployment, Published
from experiments.planning.plan_search import Plan
from swiftspec_jax.simulator.planning import rounds as rounds_lib

_WIDE = 'bfloat16'  # of matrices that are not quantized


def row(
  plan: Plan,
  deployment: Deployment,
  ratios: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:
  """Returns a line of search.jsonl.

  Args:
    plan: plan of the line.
    deployment: deployment that it is of.
    ratios: published over predicted seconds of targets and of drafts, f[N] and
      f[M]; with them it is a line of rows.jsonl, and has an interval.
  """
  choice, tree = plan.choice, plan.recording.tree
  rounds, times = plan.recording.rounds, plan.price.times
  values = {
    'plan': choice.name,
    'mode': choice.mode,
    'chips': choice.chips,
    'target_chips': choice.target_chips,
    'draft_chips': choice.draft_chips,
    'kernels': choice.kernels,
    'weight_dtype': choice.weight_dtype or _WIDE,
    'draft': choice.draft.name,
    'draft_weight_dtype': choice.draft_weight_dtype or _WIDE,
    'num_nodes': tree.num_nodes,
    'width': tree.num_leaves,
    'num_draft_steps': tree.num_draft_steps,
    'acceptance_length': rounds.acceptance_length,
    'target_step_seconds': times.target,
    'draft_step_seconds': times.draft,
    'measured': ' '.join(plan.price.measured),
    'tokens_per_second': plan.tokens_per_second,
    'slow_tokens_per_second': plan.slow_tokens_per_second,
  }
  if ratios is not None:
    sure = np.ones(1)
    low, high = rounds_lib.interval(
      rounds,
      times,
      *(
        sure if name in plan.price.measured else own
        for name, own in zip(('target', 'draft'), ratios, strict=True)
      ),
    )
    known = [p for p in deployment.published if is_of(plan, p)]
    values |= {
      'low': low,
      'high': high,
      'published': known[0].tokens_per_second if known else None,
    }
    values['parts'] = plan.parts
  return {**values, 'limit': max(plan.parts, key=plan.parts.get)}


def flags_of(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of flags that a row stands for, by name."""
  weight_dtype, draft_weight_dtype = (
    None if row[name] == _WIDE else row[name]
    for name in ('weight_dtype', 'draft_weight_dtype')
  )
  is_same = draft_weight_dtype == weight_dtype
  return {
    'mode': row['mode'],
    'weight_dtype': weight_dtype,
    'draft_weight_dtype': None if is_same else draft_weight_dtype or 'wide',
    'target_devices': row['target_chips'],
    'draft_devices': row['draft_chips'] if row['mode'] == 'async' else None,
    **{name: row[name] for name in ('num_nodes', 'width', 'num_draft_steps')},
  }


def is_of(plan: Plan, published: Published) -> bool:
  """Whether a published figure is of this mode and split, and fused."""
  return plan.choice.group == (published.mode, published.target_chips, True)
