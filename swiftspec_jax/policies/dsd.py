"""The policies in the code of SmartSpec's authors, to compare with.

They follow the branches `dsd` (vllm/spec_decode/dsd.py, spec_decode_worker.py)
and `req-dsd` (vllm/v1/spec_decode/auto_tuner.py) of
https://github.com/LiuXiaoxuanPKU/vllm, for drafters that are models, with the
constants there. Seconds are those of this engine's cost model. Drafts come
before prompts, as in vLLM.

Legend: B rows, K longest draft.
"""

import collections

import numpy as np

from swiftspec_jax import cost_model, policies

_WINDOW = 100  # steps


def search(
  view: policies.StepView,
  costs: cost_model.CostModel,
  acceptance: float,
  *,
  num_drafting: int | None = None,
  plain_bonus: float = 1.0,
) -> int:
  """Returns the first declared length whose next one has no higher goodput.

  Args:
    view: the batch.
    costs: seconds of a step.
    acceptance: probability that a draft token is accepted if those before it
      are, the same for all.
    num_drafting: rows that have a draft; None for all.
    plain_bonus: factor on the goodput of a step without drafts.
  """
  buckets, num_rows = view.buckets, view.num_rows
  if num_drafting is None:
    num_drafting = num_rows
  best, best_goodput = 0, -1.0
  for length, steps in zip(buckets.lengths, buckets.draft_steps, strict=True):
    wanted = np.minimum(view.limits, length)
    num_tokens = num_rows + num_drafting * length
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
    goodput = (num_rows + num_drafting * gained) / seconds
    if length == 0:
      goodput *= plain_bonus
    if goodput <= best_goodput:
      break
    best, best_goodput = length, goodput
  return best


def share_out(length: int, rates: np.ndarray) -> np.ndarray:
  """Returns lengths i64[B] in proportion to the acceptance f64[B] of the rows.

  Args:
    length: the mean, up to rounding.
    rates: shares of accepted tokens.
  """
  factor = length * len(rates) / max(rates.sum(), 1e-9)
  return (0.5 + factor * rates).astype(int)


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


class DsdPerRequest(policies.Policy):
  """A length for each request, in proportion to its acceptance.

  In every 200th step all rows draft as much as they may, and the best common
  length is shared out. This holds until the next such step; requests that come
  meanwhile get the common length.

  Acceptance is the mean share of accepted among verified tokens in the last 100
  steps, 0.5 before there is one. A request that gets no tokens counts as
  rejected once.
  """

  _UPDATE_EVERY = 200  # steps
  _PRIOR = 0.5

  def __init__(self, costs: cost_model.CostModel):
    """Starts without knowledge.

    Args:
      costs: seconds of a step.
    """
    self._costs = costs
    self._shares: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self._length: int | None = None  # the common one
    # Of the requests in the slots: what they get, their last shares.
    self._request_ids = np.zeros(0, np.int64)
    self._lengths = self._num_shares = self._request_ids
    self._request_shares = np.zeros((0, _WINDOW))

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    self._make_room(view)
    lengths = view.limits
    if self._length is not None and not self._is_update(view):
      lengths = np.minimum(lengths, self._lengths[view.slots])
    return policies.DraftPlan(lengths=lengths, is_first=True)

  def plan_verify(self, view, plan, drafts) -> np.ndarray:
    del plan
    num_drafting = int(np.count_nonzero(drafts.lengths))
    if not (num_drafting and self._is_update(view)):
      return drafts.lengths
    acceptance = np.mean(self._shares) if self._shares else self._PRIOR
    self._length = search(
      view, self._costs, float(acceptance), num_drafting=num_drafting
    )
    self._lengths[view.slots] = share_out(self._length, self._rates(view))
    return np.minimum(drafts.lengths, self._lengths[view.slots])

  def observe(self, outcome: policies.Outcome) -> None:
    view = outcome.view
    num_verified = outcome.lengths
    if num_verified.any():
      share = outcome.num_accepted.sum() / num_verified.sum()
      self._shares.append(float(share))
    is_cut = self._is_update(view) & (outcome.drafts.lengths > 0)
    rows = np.flatnonzero((num_verified > 0) | is_cut)
    shares = outcome.num_accepted[rows] / np.maximum(num_verified[rows], 1)
    self._make_room(view)
    slots = view.slots[rows]
    places = self._num_shares[slots] % _WINDOW
    self._request_shares[slots, places] = shares
    self._num_shares[slots] += 1

  def _is_update(self, view: policies.StepView) -> bool:
    return view.step % self._UPDATE_EVERY == 0

  def _rates(self, view: policies.StepView) -> np.ndarray:
    """Returns the acceptance of each row, f64[B]."""
    counts = np.minimum(self._num_shares[view.slots], _WINDOW)
    sums = self._request_shares[view.slots].sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), self._PRIOR)

  def _make_room(self, view: policies.StepView) -> None:
    """Forgets the requests that had the slots of others before."""
    size = view.buckets.max_rows
    if len(self._request_ids) != size:
      self._request_ids = np.full(size, -1)
      self._lengths = np.zeros(size, np.int64)
      self._num_shares = np.zeros(size, np.int64)
      self._request_shares = np.zeros((size, _WINDOW))
    is_new = self._request_ids[view.slots] != view.request_ids
    slots = view.slots[is_new]
    self._request_ids[slots] = view.request_ids[is_new]
    self._num_shares[slots] = 0
    self._request_shares[slots] = 0.0
    if self._length is not None:
      self._lengths[slots] = self._length
