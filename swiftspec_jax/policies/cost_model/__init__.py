"""How long a step takes, before it is run.

The parts of a step: the draft's forwards, what it reads before them, the
target's forward, and what the host and the verification add. Sizes are those of
the compiled buckets, so padding is paid for.
"""

import dataclasses
from typing import Protocol

import numpy as np

# One number, or one for each of several candidates.
Numbers = np.ndarray | float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepSeconds:
  """Seconds of the parts of a step."""

  draft: Numbers
  target: Numbers
  overhead: Numbers
  draft_prefill: Numbers = 0.0

  @property
  def total(self) -> Numbers:
    """Seconds of the step."""
    return self.draft + self.target + self.overhead + self.draft_prefill


class CostModel(Protocol):
  """Predicts the time of a step."""

  def predict(
    self,
    num_rows: int,
    num_query_tokens: Numbers,
    kv_tokens: float,
    num_draft_steps: Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    prefills_draft: bool | np.ndarray = False,
  ) -> StepSeconds:
    """Returns the seconds of steps; tokens and forwards broadcast.

    Args:
      num_rows: declared size of the rows.
      num_query_tokens: declared size of the tokens that the target takes.
      kv_tokens: tokens in the cache of all rows together.
      num_draft_steps: forwards of the draft, 0 for plain decoding.
      finds_drafts: whether drafting, where there is any, gives drafts to
        verify: a lookup may find none. Broadcasts with the forwards.
      prefills_draft: whether a draft model reads a chunk of late tokens before
        (`drafters.models.draft_prefill`). Broadcasts with the forwards, too.
    """
