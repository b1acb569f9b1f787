"""AdaServe: promises first, throughput with what is left.

Li et al., arXiv 2501.12162. Every row gets a draft, and one budget of nodes is
shared out when it is known what was drafted. First each row
gets the nodes it needs to keep its promised time per output token, the neediest
first. The rest goes to the most probable nodes of the whole batch.

Legend: B rows, K longest draft.
"""

import numpy as np

from swiftspec_jax import cost_model, policies
from swiftspec_jax.policies import allocation
from swiftspec_jax.policies.prediction.estimators import (
  ChainEstimator,
  Estimator,
)

# Share by which drafts may make the target's part of a step longer. This is the
# budget, raised to the next declared number of tokens.
_SLACK = 0.5
# Nodes that a row may get because of its promise, as a multiple of an equal
# share of the budget.
_MOST_FACTOR = 1.2
# Tokens by which a row may be late. One that is later cannot keep its promise
# and competes by probability alone.
_MAX_LATE = 6.0
_ROUNDING = 1e-9  # tokens by which a sum of floats may miss a need


class AdaServe(policies.Policy):
  """Chooses the nodes that the target verifies, by need and probability.

  The gain of a node is the drafter's own expectation, calibrated, or what the
  outcomes say of its place. As a node is never more probable than the one
  above it, the first nodes of a row are the best tree of that size.
  """

  def __init__(
    self, costs: cost_model.CostModel, estimator: Estimator | None = None
  ):
    """Starts without knowledge.

    Args:
      costs: seconds of a step.
      estimator: predictor of the acceptance; by default that of chains.
    """
    self._costs = costs
    self._estimator = estimator or ChainEstimator()

  def plan_draft(self, view: policies.StepView) -> policies.DraftPlan:
    num_nodes = self._num_nodes(view) if view.num_rows else 0
    if not num_nodes:
      return policies.DraftPlan(lengths=np.zeros_like(view.limits))
    steps = num_steps(
      view.num_rows + num_nodes, view.num_rows, view.buckets.draft_steps[-1]
    )
    is_shallow = view.buckets.draft_step_array <= steps
    longest = view.buckets.length_array[is_shallow].max()
    lengths = np.minimum(view.limits, longest)
    return policies.DraftPlan(
      lengths=lengths, is_first=True, prunes_after_draft=True
    )

  def plan_verify(
    self,
    view: policies.StepView,
    plan: policies.DraftPlan,
    drafts: policies.Drafts,
  ) -> np.ndarray:
    if not drafts.lengths.any():
      return drafts.lengths
    gains = self._estimator.gains_of(drafts)
    if gains is None:
      gains = self._estimator.gains(view)
    gains = gains * (np.arange(len(gains))[:, None] < drafts.lengths)
    num_nodes = self._num_nodes(view)
    seconds = self._seconds(view, num_nodes, int(plan.lengths.max()))
    most = _MOST_FACTOR * (view.num_rows + num_nodes) / view.num_rows
    return select(
      gains, self._needs(view, drafts, seconds), num_nodes, int(most)
    )

  def observe(self, outcome: policies.Outcome) -> None:
    if outcome.view.num_rows:
      self._estimator.observe(outcome)

  def _needs(
    self, view: policies.StepView, drafts: policies.Drafts, seconds: float
  ) -> np.ndarray:
    """Returns f64[B] tokens that rows must emit in a step of `seconds`."""
    # The promise is about the tokens after the first one.
    num_output = np.maximum(view.num_output - 1, 0)
    late = view.decode_seconds / view.slo_tpots - num_output
    needs = late + seconds / view.slo_tpots
    # No more can be emitted. The paper's bound, the depth of the tree, is not
    # known of lookups.
    needs = np.minimum(needs, drafts.lengths + 1)
    return np.where(late > _MAX_LATE, -np.inf, needs)

  def _num_nodes(self, view: policies.StepView) -> int:
    """Returns how many nodes, roots left out, the step may verify."""
    declared = view.buckets.query_token_array
    larger = declared[np.searchsorted(declared, view.num_rows, 'right') :]
    # The first is the step without drafts. What a size pads is free.
    sizes = np.concatenate([[view.num_rows], larger])
    seconds = self._costs.predict(
      view.buckets.pad_rows(view.num_rows),
      view.buckets.computed_tokens(view.num_rows, sizes),
      int(view.kv_lengths.sum()),
      0,
    ).total
    is_within = seconds <= (1 + _SLACK) * seconds[0]
    budget = int(sizes[is_within].max()) - view.num_rows
    # Prompts that wait get half of the room, or new requests would starve.
    room = view.buckets.max_query_tokens - view.num_rows
    return min(budget, max(room - view.num_prefill_tokens, room // 2))

  def _seconds(
    self, view: policies.StepView, num_nodes: int, longest: int
  ) -> float:
    """Returns how long the step takes, however the nodes are shared out."""
    size = view.num_rows + num_nodes + view.num_prefill_tokens
    predicted = self._costs.predict(
      view.buckets.pad_rows(view.num_rows),
      view.buckets.computed_tokens(
        view.num_rows, min(size, view.buckets.max_query_tokens)
      ),
      int(view.kv_lengths.sum()) + view.prefill_kv_tokens,
      view.buckets.steps_of(longest),
    )
    return float(predicted.total)


def select(
  gains: np.ndarray, needs: np.ndarray, num_nodes: int, most: int
) -> np.ndarray:
  """Returns how many nodes of each row are verified, i64[B].

  Both phases take the best nodes of a row first. Sums of gains that never rise
  are concave, so this is also the best choice of all: as many as each row
  needs, then the best of the batch.

  Args:
    gains: f64[K, B] probability that a node is accepted, not rising along K; 0
      for what was not drafted.
    needs: f64[B] tokens that rows must emit, the target's own one included.
    num_nodes: budget of all rows together, roots left out.
    most: nodes that a row may get by its need.
  """
  expected = 1 + np.cumsum(gains, axis=0) - gains  # before each node
  is_wanted = (expected < needs - _ROUNDING) & (gains > 0)
  wanted = np.minimum(is_wanted.sum(axis=0), most)
  order = np.argsort(-needs, kind='stable')
  before = np.cumsum(wanted[order]) - wanted[order]
  lengths = np.zeros_like(wanted)
  lengths[order] = np.clip(num_nodes - before, 0, wanted[order])
  rest = gains * (np.arange(len(gains))[:, None] >= lengths)
  left = num_nodes - int(lengths.sum())
  return lengths + allocation.allocate(rest, left)


def num_steps(budget: int, num_rows: int, most: int) -> int:
  """Returns the forwards of the draft: the paper's d, with c1 = 0.

  Args:
    budget: tokens that the target verifies, roots included.
    num_rows: rows of the step.
    most: most forwards.
  """
  return min(max(budget // num_rows - 1, 1), most)
