"""Requests whose caches lie in pages."""

import jax
import numpy as np

from swiftspec_jax import errors, images, requests, types
from swiftspec_jax.engine.handles import Handle
from swiftspec_jax.engine.jobs import Job
from swiftspec_jax.model import Model
from swiftspec_jax.requests import Request, Row
from swiftspec_jax.scheduling import pages
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.serving.drafters.draft_nodes import ShownDrafts
from swiftspec_jax.step import slot_sampling
from swiftspec_jax.step.verdicts import Verdicts


def check(
  request: Request, model: Model, config: SchedulerConfig, max_images: int = 0
) -> None:
  """Raises UserError for a request that an engine cannot serve."""
  requests.check(request, model, config.max_context, 'this engine', max_images)
  if request.images and jax.process_count() > 1:
    raise errors.UserError(
      f'images are not sent to the {jax.process_count()} processes of this '
      'engine; serve models that read images from one'
    )
  slot_sampling.check(request.sampling)
  config.check(len(request.token_ids), _max_new_tokens(request, config))


def _max_new_tokens(request: Request, config: SchedulerConfig) -> int:
  most = config.max_context - len(request.token_ids)
  return min(request.sampling.max_new_tokens or most, most)


class PagedJob(Job):
  """A request that knows the keys of its pages.

  Attributes:
    max_new_tokens: number of tokens at which the output must end.
  """

  def __init__(
    self,
    request: Request,
    handle: Handle,
    model: Model,
    config: SchedulerConfig,
    max_speculative_tokens: int | None,
    *,
    chains_by_model: bool,
  ):
    """Starts the clock of the first token."""
    self.max_new_tokens = _max_new_tokens(request, config)
    limit = len(request.token_ids) + self.max_new_tokens
    row = Row(
      handle.request_id,
      request,
      limit,
      model,
      config.buckets.max_length,
      chains_by_model=chains_by_model,
    )
    super().__init__(row, handle, max_speculative_tokens)
    self._page_size = config.page_size if config.shares_prefixes else None
    self._num_paged = 0  # tokens in pages whose keys are known
    self._last_key = b''
    self._by_model = chains_by_model
    self._vision = model.config.vision

  @property
  def num_known(self) -> int:
    """Tokens of prompt and output."""
    return len(self.request.token_ids) + len(self._row.token_ids)

  def known_tokens(self) -> list[int]:
    """Returns prompt and output."""
    return [*self.request.token_ids, *self._row.token_ids]

  def new_page_keys(self) -> list[bytes]:
    """Returns the keys of the pages that were filled since the last call."""
    if self._page_size is None:
      return []
    if self.num_known - self._num_paged < self._page_size:
      return []
    token_ids = self._distinct_tokens()[self._num_paged :]
    keys = pages.keys_of(token_ids, self._page_size, self._last_key)
    self._num_paged += len(keys) * self._page_size
    self._last_key = keys[-1]
    return keys

  def _distinct_tokens(self) -> list[int] | np.ndarray:
    """Returns prompt and output; the places of other images are different."""
    if self._vision is None:
      return self.known_tokens()
    prompt = images.distinct(
      self.request.token_ids, self.request.images, self._vision
    )
    rest = np.zeros((len(self._row.token_ids), prompt.shape[1]), np.int32)
    rest[:, 0] = self._row.token_ids
    return np.concatenate([prompt, rest])

  def push_verdict(
    self,
    verdict: Verdicts,
    num_drafted: int,
    logprobs: types.Logprobs | None,
    shown: ShownDrafts | None,
    *,
    uses_lookup: bool,
    news: np.ndarray | None = None,
  ) -> list[int]:
    """Takes the verdict of a step; returns the new tokens of the output.

    Args:
      verdict: verdict on the drafts of the slot.
      num_drafted: draft tokens that were verified.
      logprobs: those of `push`.
      shown: drafts of this row, if anybody wants to see some.
      uses_lookup: whether a lookup drafted while a draft model rested.
      news: row i32[3] of `SlotDrafts.report`, if there is one.
    """
    end = int(verdict.num_accepted) + 1
    if not self._row.token_ids:
      self.end_prefill(num_tokens=end)
    by_text = uses_lookup or not self._by_model
    path, is_looked_up = list(range(end)), [by_text] * end
    if verdict.tree is not None:
      path = verdict.tree.path[:end].tolist()
      is_looked_up = (by_text | verdict.tree.is_looked_up[:end]).tolist()
    outcome, num_forwards = types.NO_OUTCOME, 0
    if news is not None:
      outcome, num_forwards, _ = news.tolist()
    report = types.StepReport(
      token_ids=verdict.token_ids[:end].tolist(),
      num_drafted=num_drafted,
      # Of what the devices found, which may be less than what was verified.
      num_levels=min(int(verdict.num_levels), num_drafted),
      num_accepted=end - 1,
      is_tree=verdict.tree is not None and not uses_lookup,
      outcome=outcome,
      num_forwards=num_forwards if outcome != types.NO_OUTCOME else 0,
      path=path,
      is_looked_up=is_looked_up[1:],
    )
    nodes = ()
    if self.shows_drafts and shown is not None:
      nodes = shown.nodes(num_drafted, path, not by_text)
    return self.push(report, logprobs, nodes)
