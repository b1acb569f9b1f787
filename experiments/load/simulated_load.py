"""Requests that are served in virtual time: flags, and what they stand for."""

import dataclasses
import pathlib
import time
from typing import Any

import numpy as np
from absl import flags

from experiments.flags import load_flags
from swiftspec_jax import errors, policies, simulator
from swiftspec_jax.cli.flags import policy_names
from swiftspec_jax.policies import cost_model
from swiftspec_jax.policies.batch_table import BatchTable
from swiftspec_jax.policies.cost_model import profiles, storage
from swiftspec_jax.policies.cost_model.self_draft import SelfDraftCosts
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler import Scheduler
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.simulator.arrivals import Arrivals
from swiftspec_jax.simulator.load_metrics import LoadRecorder

_PROFILE = flags.DEFINE_string(
  'profile',
  'llama-8b-h100',
  f'Costs of a step: {" or ".join(profiles.PROFILES)} (published), or the file '
  'of a measurement.',
)
_SELF_DRAFT_TOKENS = flags.DEFINE_integer(
  'self_draft_tokens',
  None,
  'The target drafts for itself and sees this many tokens of each text: costs '
  'of its own forwards stand in for those of the draft.',
  lower_bound=1,
)
_ACCEPTANCE = flags.DEFINE_list(
  'acceptance',
  ['0.7'],
  'Probability that a draft token is accepted if those before it are: one '
  'number, or one for each position, of which the last holds on.',
)
_ACCEPTANCE_SPREAD = flags.DEFINE_float(
  'acceptance_spread',
  0.0,
  'Requests differ: standard deviation of the acceptance between them.',
  lower_bound=0.0,
  upper_bound=0.3,
)
_SHARPNESS = flags.DEFINE_float(
  'sharpness',
  None,
  'Let the drafter know how certain its tokens are. The smaller, the more its '
  'tokens differ, from above 0.',
  lower_bound=1e-3,
)
_MAX_LENGTH = flags.DEFINE_integer(
  'max_length', 7, 'Longest draft.', lower_bound=0
)
_TREE_SIZES = flags.DEFINE_list(
  'tree_sizes',
  [],
  'Draft trees instead of chains. These are their nodes without the root after '
  'one, two, ... forwards of the draft, as in 3,7,15.',
)
_MAX_ROWS = flags.DEFINE_integer(
  'max_rows', 256, 'Most requests of a step.', lower_bound=1
)
_MAX_QUERY_TOKENS = flags.DEFINE_integer(
  'max_query_tokens', 1024, 'Most tokens that a step feeds.', lower_bound=1
)
_KV_TOKENS = flags.DEFINE_integer(
  'kv_tokens', 2**18, 'Tokens that the cache has room for.', lower_bound=16
)
_PAGE_SIZE = 16


class SimulatedLoad:
  """Serves requests as the flags say, with any policy."""

  def __init__(self, coverage: float = 1.0):
    """Reads the costs.

    Args:
      coverage: probability that a chain has a draft at all.

    Raises:
      UserError: the flags make no sense, or a request is longer than the cache.
    """
    self._costs, buckets = _costs_and_buckets()
    if _SELF_DRAFT_TOKENS.value is not None:
      self._costs = SelfDraftCosts(self._costs, _SELF_DRAFT_TOKENS.value)
    self._config = SchedulerConfig(
      buckets=buckets,
      num_pages=_KV_TOKENS.value // _PAGE_SIZE,
      max_context=_KV_TOKENS.value,
      page_size=_PAGE_SIZE,
    )
    self._table = _table(self._costs, buckets)
    self._coverage = coverage

  def policy(self, name: str) -> policies.Policy:
    """Returns a new policy."""
    return policy_names.make(
      name,
      self._config.buckets,
      costs=self._costs,
      table=self._table,
      is_tree=bool(_TREE_SIZES.value),
    )

  def check_fits(self) -> None:
    """Raises UserError if a request is longer than the cache."""
    for seed in load_flags.seeds():
      arrivals = load_flags.arrivals(1.0, seed)
      longest = (arrivals.prompt_tokens + arrivals.output_tokens).argmax()
      Scheduler(self._config).submit(
        0,
        int(arrivals.prompt_tokens[longest]),
        int(arrivals.output_tokens[longest]),
      )

  def acceptance(self, arrivals: Arrivals, seed: int) -> simulator.Acceptance:
    """Returns the luck of the requests, which all policies share."""
    buckets = self._config.buckets
    mean = _conditional_acceptance(buckets)
    generator = np.random.default_rng([seed, 1])
    offsets = generator.normal(0, _ACCEPTANCE_SPREAD.value, len(arrivals))
    acceptance = np.clip(mean[None] + offsets[:, None], 0.0, 1.0)
    if _TREE_SIZES.value:
      return simulator.TreeAcceptance(
        arrivals.output_tokens, acceptance[:, 0], buckets.max_length, seed
      )
    return simulator.ChainAcceptance(
      arrivals.output_tokens,
      acceptance,
      seed,
      coverage=self._coverage,
      sharpness=_SHARPNESS.value,
    )

  def run(
    self,
    name: str,
    arrivals: Arrivals,
    acceptance: simulator.Acceptance,
  ) -> tuple[LoadRecorder, dict[str, Any]]:
    """Serves the arrivals; returns what happened and further columns."""
    policy = self.policy(name)
    start = time.perf_counter()
    simulation = simulator.simulate(
      arrivals,
      acceptance,
      policy,
      self._config,
      self._costs,
      drafts_by_model=self._costs.drafts_by_model,
    )
    elapsed = time.perf_counter() - start
    return simulation.recorder, {
      'num_preemptions': simulation.num_preemptions,
      'simulated_requests_per_second': len(arrivals) / elapsed,
    }


def title() -> str:
  """Returns what the pictures are of."""
  acceptance = ','.join(_ACCEPTANCE.value)
  return f'simulated: {_PROFILE.value}, acceptance {acceptance}'


def _costs_and_buckets() -> tuple[cost_model.CostModel, StepBuckets]:
  name = _PROFILE.value
  if name not in profiles.PROFILES and pathlib.Path(name).exists():
    measured = storage.load(pathlib.Path(name))
    return measured, measured.key.buckets
  # A plain least-squares fit makes larger batches faster at short contexts.
  costs = profiles.get(name).monotone()
  buckets = StepBuckets.powers_of_two(
    _MAX_ROWS.value, _MAX_QUERY_TOKENS.value, _MAX_LENGTH.value
  )
  if not _TREE_SIZES.value:
    return costs, buckets
  sizes = load_flags.positive_numbers('tree_sizes', _TREE_SIZES.value)
  steps = tuple(range(len(sizes) + 1))
  lengths = (0, *map(int, sizes))
  return costs, dataclasses.replace(buckets, lengths=lengths, draft_steps=steps)


def _conditional_acceptance(buckets: StepBuckets) -> np.ndarray:
  """Returns f64[K], the mean over requests."""
  found = load_flags.positive_numbers('acceptance', _ACCEPTANCE.value)
  if max(found) > 1:
    raise errors.UserError(f'--acceptance: {max(found):g} is more than 1')
  size = max(buckets.max_length, 1)
  return np.array((found + found[-1:] * size)[:size])


def _table(costs: cost_model.CostModel, buckets: StepBuckets) -> BatchTable:
  """Profiles the table for the acceptance and the mean context."""
  trial = load_flags.arrivals(1.0, 0)
  context = trial.prompt_tokens.mean() + trial.output_tokens.mean() / 2
  acceptance = _conditional_acceptance(buckets)
  if _TREE_SIZES.value:
    _, gains = simulator.best_nodes(acceptance[0], buckets.max_length)
    acceptance = gains / np.concatenate([[1.0], gains[:-1]])
  return BatchTable.profile(costs, buckets, acceptance, int(context))
