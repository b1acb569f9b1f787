"""The policy in the code of SmartSpec's authors, to compare with.

It follows the branch `dsd` (vllm/spec_decode/dsd.py, spec_decode_worker.py) of
https://github.com/LiuXiaoxuanPKU/vllm, for drafters that are models, with the
constants there. Seconds are those of this engine's cost model. Drafts come
before prompts, as in vLLM.
"""

import numpy as np

from swiftspec_jax import policies
from swiftspec_jax.policies import cost_model


def search(
  view: policies.StepView,
  costs: cost_model.CostModel,
  acceptance: float,
  *,
  plain_bonus: float = 1.0,
) -> int:
  """Returns the first declared length whose next one has no higher goodput.

  Args:
    view: the batch.
    costs: seconds of a step.
    acceptance: probability that a draft token is accepted if those before it
      are, the same for all.
    plain_bonus: factor on the goodput of a step without drafts.
  """
  buckets, num_rows = view.buckets, view.num_rows
  best, best_goodput = 0, -1.0
  for length, steps in zip(buckets.lengths, buckets.draft_steps, strict=True):
    wanted = np.minimum(view.limits, length)
    num_tokens = num_rows * (1 + length)
    is_too_long = num_tokens > buckets.max_query_tokens
    if is_too_long or (view.fitting(wanted) < wanted).any():
      break
    seconds = costs.predict(
      buckets.pad_rows(num_rows),
      buckets.computed_tokens(num_rows, num_tokens),
      int(view.kv_lengths.sum()),
      steps,
    ).total
    gained = sum(acceptance**place for place in range(1, length + 1))
    goodput = num_rows * (1 + gained) / seconds
    if length == 0:
      goodput *= plain_bonus
    if goodput <= best_goodput:
      break
    best, best_goodput = length, goodput
  return best


class Dsd(policies.Policy):
  """One length for all rows, chosen in every 20th step that is not paused.

  Speculation has to promise 1.1 times the goodput of plain decoding. Where it
  does not, it pauses for 100 steps of batches of at least this size.
  Acceptance is a moving average, 0.85 to 0.15, of the share since the start.

  Two things differ. The authors' sampler also judges tokens after the first
  rejection; here those that were reached count, which has the same mean if all
  tokens are equally easy. There, requests that were in a batch without drafts
  never get any, as their draft has missed tokens; here it takes them in.
  """

  _UPDATE_EVERY = 20  # steps
  _PAUSE = 100  # steps
  _PLAIN_BONUS = 1.1
  _KEPT = 0.85

  def __init__(self, costs: cost_model.CostModel):
    """Starts without knowledge.

    Args:
      costs: seconds of a step.
    """
    self._costs = costs
    self.acceptance_rate = 0.7
    self._num_accepted = self._num_judged = 0
    self._num_asked = 0
    self._length = 0
    self._paused_rows = np.inf  # from this batch size on
    self._num_paused = 0  # steps

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    length = 0
    if view.num_rows and not self._is_paused(view.num_rows):
      if self._num_asked % self._UPDATE_EVERY == 0:
        self._length = search(
          view,
          self._costs,
          self.acceptance_rate,
          plain_bonus=self._PLAIN_BONUS,
        )
      self._num_asked += 1
      length = self._length
      if not length:
        self._paused_rows = view.num_rows
    lengths = np.minimum(view.limits, length)
    return policies.DraftPlan(lengths=lengths, is_first=True)

  def observe(self, outcome: policies.Outcome) -> None:
    if not outcome.lengths.any():
      return
    accepted = outcome.num_accepted
    self._num_accepted += int(accepted.sum())
    self._num_judged += int(np.minimum(accepted + 1, outcome.lengths).sum())
    share = self._num_accepted / self._num_judged
    kept = self._KEPT * self.acceptance_rate
    self.acceptance_rate = kept + (1 - self._KEPT) * share

  def _is_paused(self, num_rows: int) -> bool:
    if num_rows >= self._paused_rows:
      self._num_paused += 1
    if self._num_paused % self._PAUSE == 0:
      self._paused_rows, self._num_paused = np.inf, 0
    return num_rows >= self._paused_rows
