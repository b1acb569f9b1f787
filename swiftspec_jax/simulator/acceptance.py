"""Which draft tokens are accepted: luck that is the same for every policy.

Every token of every output has a draw of its own, made before anything runs.
Whatever a policy does, the token of request r at position t is as easy to
draft as under any other policy.

Legend: n requests, B rows, K longest draft, T output tokens of all requests.
"""

import heapq

import numpy as np

from swiftspec_jax import policies


class ChainAcceptance:
  """Chains: a draft token is accepted if it and all before it are lucky."""

  def __init__(
    self,
    output_tokens: np.ndarray,
    conditional_acceptance: np.ndarray,
    seed: int,
    *,
    coverage: float = 1.0,
    sharpness: float | None = None,
  ):
    """Draws the luck of all tokens.

    Args:
      output_tokens: i64[n].
      conditional_acceptance: f64[n, K] probability that the draft token of a
        request at a position of the draft is accepted if it is reached.
      seed: seed of the draws.
      coverage: probability that there is a draft after a token.
      sharpness: None for a drafter without confidences. Else every token has a
        probability of its own, which the drafter knows: Beta with this sum of
        parameters around that of the request's first position. The smaller,
        the more the confidence tells.
    """
    self._num_positions = conditional_acceptance.shape[1]
    self._offsets = _offsets(output_tokens)
    requests = np.repeat(np.arange(len(output_tokens)), output_tokens)
    generator = np.random.default_rng(seed)
    luck = generator.random(len(requests))
    self._has_draft = generator.random(len(requests)) < coverage
    self._confidences = None
    if sharpness is None:
      limits = conditional_acceptance[requests].T
    else:
      mean = conditional_acceptance[requests, 0]
      certain = np.clip(mean, 1e-6, 1 - 1e-6) * sharpness
      self._confidences = generator.beta(certain, sharpness - certain)
      ahead = np.arange(len(requests)) + np.arange(self._num_positions)[:, None]
      limits = self._confidences.take(ahead, mode='clip')
    self._runs = _run_lengths(luck, limits)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> policies.Drafts:
    """Returns the drafts of rows, of at most i64[B] tokens."""
    places = self._offsets[view.request_ids] + view.num_output
    lengths = lengths * self._has_draft[places]
    if self._confidences is None:
      return policies.Drafts(lengths=lengths)
    ahead = places + np.arange(self._num_positions)[:, None]
    confidences = self._confidences.take(ahead, mode='clip')
    return policies.Drafts(lengths=lengths, confidences=confidences)

  def verify(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns how many draft tokens are accepted, i64[B], and no ranks."""
    places = self._offsets[view.request_ids] + view.num_output
    return np.minimum(self._runs[places], lengths), None


class TreeAcceptance:
  """Trees: the true token is the draft's r-th guess with probability a(1-a)^r.

  The proposal holds the most probable nodes, best first, for the mean `a`.
  """

  def __init__(
    self,
    output_tokens: np.ndarray,
    acceptance: np.ndarray,
    size: int,
    seed: int,
  ):
    """Draws the rank of all tokens among the draft's guesses.

    Args:
      output_tokens: i64[n].
      acceptance: f64[n] probability that the first guess is right.
      size: most nodes of a proposal, without the root.
      seed: seed of the draws.
    """
    self._offsets = _offsets(output_tokens)
    requests = np.repeat(np.arange(len(output_tokens)), output_tokens)
    luck = np.random.default_rng(seed).random(len(requests))
    ranks = np.log(luck) / np.log1p(-np.clip(acceptance, 0, 1 - 1e-9))[requests]
    self._children, _ = best_nodes(acceptance.mean(), size)
    most = self._children.shape[1] - 1  # a rank that no node has
    self._ranks = np.minimum(ranks, most).astype(np.int64)

  def draft(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> policies.Drafts:
    """Returns the sizes asked for: there is always a tree."""
    del view
    return policies.Drafts(lengths=lengths)

  def verify(
    self, view: policies.StepView, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers i64[B] and places i64[D, B] of accepted nodes."""
    places = self._offsets[view.request_ids] + view.num_output
    node = np.zeros(len(lengths), np.int64)  # the root
    path = [np.full(len(lengths), -1)]
    is_alive = lengths > 0
    while is_alive.any():
      ranks = self._ranks.take(places, mode='clip')
      node = np.where(is_alive, self._children[node, ranks], -1)
      is_alive &= (node > 0) & (node <= lengths)
      path.append(np.where(is_alive, node - 1, -1))
      places = places + 1
    return (np.array(path) >= 0).sum(axis=0), np.array(path)


def best_nodes(acceptance: float, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tree of the most probable nodes, best first.

  Args:
    acceptance: a, if the r-th guess is right with probability a (1 - a)^r.
    size: nodes without the root.

  Returns:
    i64[size + 1, size + 1] the child of each node (0 is the root) for each
    rank, -1 where there is none; and f64[size] the probability of each node.
  """
  children = np.full((size + 1, size + 1), -1)
  gains = np.zeros(size)
  heap = [(-acceptance, 0, 0)]  # gain, parent and rank of the next nodes
  for node in range(1, size + 1):
    gain, parent, rank = heapq.heappop(heap)
    children[parent, rank], gains[node - 1] = node, -gain
    heapq.heappush(heap, (gain * (1 - acceptance), parent, rank + 1))
    heapq.heappush(heap, (gain * acceptance, node, 0))
  return children, gains


def _offsets(output_tokens: np.ndarray) -> np.ndarray:
  return np.cumsum(output_tokens) - output_tokens


def _run_lengths(luck: np.ndarray, limits: np.ndarray) -> np.ndarray:
  """Returns how many tokens from each one on are lucky in a row.

  Args:
    luck: f64[T].
    limits: f64[K, T]: below which luck a token after this one, 0, 1, ...
      K - 1 places further, counts. Tokens of the next request are reached, too,
      but no draft is longer than its output.
  """
  num_positions, num_tokens = limits.shape
  runs = np.zeros(num_tokens, np.int64)
  is_alive = np.ones(num_tokens, bool)
  for position in range(num_positions):
    shifted = np.ones(num_tokens)
    shifted[: num_tokens - position] = luck[position:]
    is_alive &= shifted < limits[position]
    runs += is_alive
  return runs
