"""Costs of drafts that the target makes itself over a part of each text.

A forward of such a draft is a plain step at a short context, so costs of the
target say all (MagicDec, arXiv 2408.11049).
"""

import dataclasses

import numpy as np

from swiftspec_jax import cost_model

_NUM_QUERIES = 32  # latest tokens of a row, which choose


@dataclasses.dataclass(frozen=True)
class SelfDraftCosts:
  """Costs of a target, with its own forwards for drafts.

  Where attention chooses what drafts see (SnapKV), each row feeds its latest
  tokens once more, over all of its text, whenever it has grown by `interval`
  tokens. A step pays for the share of that which its tokens use up if all
  drafts stand: too much where some do not.

  Attributes:
    costs: costs of the target; what they say of drafts does not count.
    num_seen: tokens of a row that a draft sees.
    interval: tokens that a row grows by between two choices; None where nothing
      is chosen.
  """

  costs: cost_model.CostModel
  num_seen: int
  interval: int | None = None

  drafts_by_model = False  # the target reads the texts

  def predict(
    self,
    num_rows: int,
    num_query_tokens: cost_model.Numbers,
    kv_tokens: float,
    num_draft_steps: cost_model.Numbers,
    *,
    finds_drafts: bool | np.ndarray = True,
    prefills_draft: bool | np.ndarray = False,
  ) -> cost_model.StepSeconds:
    del prefills_draft  # the cache is the target's
    found = self.costs.predict(
      num_rows,
      num_query_tokens,
      kv_tokens,
      num_draft_steps,
      finds_drafts=finds_drafts,
    )
    # Rows of a batch differ; their mean is what is known here.
    seen = min(kv_tokens, num_rows * self.num_seen)
    forward = self.costs.predict(num_rows, num_rows, seen, 0).target
    num_draft_steps = np.asarray(num_draft_steps)
    draft = forward * num_draft_steps
    if self.interval is not None:
      num_emitted = num_rows * (num_draft_steps + 1) * (num_draft_steps > 0)
      choice = self.costs.predict(1, _NUM_QUERIES, kv_tokens / num_rows, 0)
      draft = draft + choice.target * num_emitted / self.interval
    return dataclasses.replace(found, draft=draft)
