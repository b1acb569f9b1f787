"""Requests of an engine, and what has come of them."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from swiftspec_jax import errors, images, requests, types
from swiftspec_jax.drafters import draft_nodes
from swiftspec_jax.engine.handles import Handle, Update
from swiftspec_jax.model import Model
from swiftspec_jax.requests import DraftNode, Request, Row
from swiftspec_jax.results import GenerationResult
from swiftspec_jax.scheduling import pages
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.verdicts import Verdicts

if TYPE_CHECKING:
  import llguidance


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
  if request.sampling.structured_outputs and jax.process_count() > 1:
    raise errors.UserError(
      f'structured_outputs is for engines of one process, and this one has '
      f'{jax.process_count()}; leave it out'
    )
  config.check(len(request.token_ids), _max_new_tokens(request, config))


def _max_new_tokens(request: Request, config: SchedulerConfig) -> int:
  most = config.max_context - len(request.token_ids)
  return min(request.sampling.max_new_tokens or most, most)


class Job:
  """A request, its output, the handle of its user, and the keys of its pages.

  Attributes:
    handle: handle that gets the news.
    max_speculative_tokens: longest draft that the user wants, None for any.
    shows_drafts: whether the news have `draft_nodes`.
    max_new_tokens: number of tokens at which the output must end.
  """

  shows_drafts = False

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
    self.handle = handle
    self.max_speculative_tokens = max_speculative_tokens
    self._row = Row(
      request,
      limit,
      model,
      config.buckets.max_length,
      chains_by_model=chains_by_model,
    )
    self._row.start()
    self._page_size = config.page_size if config.shares_prefixes else None
    self._num_paged = 0  # tokens in pages whose keys are known
    self._last_key = b''
    self._by_model = chains_by_model
    self._vision = model.config.vision

  @property
  def request(self) -> Request:
    """What to decode."""
    return self._row.request

  @property
  def matcher(self) -> 'llguidance.LLMatcher | None':
    """Where in its grammar the output is; None without one."""
    return self._row.matcher

  @property
  def request_id(self) -> int:
    """Unique in the engine."""
    return self.handle.request_id

  @property
  def limit(self) -> int:
    """Tokens, prompt and output together, at which the output must end."""
    return self._row.limit

  @property
  def is_finished(self) -> bool:
    """Whether the output is complete."""
    return self._row.is_finished

  def decode_seconds(self, now: float) -> float:
    """Returns the seconds from the first output token to `now`.

    `now` is one of `time.perf_counter`. Without a token it is 0.
    """
    return self._row.decode_seconds(now)

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
    drafted: np.ndarray | None,
    *,
    news: np.ndarray | None = None,
  ) -> list[int]:
    """Takes the verdict of a step; returns the new tokens of the output.

    Args:
      verdict: verdict on the drafts of the slot.
      num_drafted: draft tokens that were verified.
      logprobs: those of `push`.
      drafted: chain i32[K], or packed `types.TreeProposal` of the slot, if
        anybody wants to see drafts.
      news: nodes, outcome and forwards as in `verdicts_of`, if there are.
    """
    end = int(verdict.num_accepted) + 1
    by_text = not self._by_model
    path, is_looked_up = list(range(end)), [by_text] * end
    if verdict.tree is not None:
      path = verdict.tree.path[:end].tolist()
      is_looked_up = (by_text | verdict.tree.is_looked_up[:end]).tolist()
    outcome, num_forwards = types.NO_OUTCOME, 0
    if news is not None:
      _, outcome, num_forwards = news.tolist()
    report = types.StepReport(
      token_ids=verdict.token_ids[:end].tolist(),
      num_drafted=num_drafted,
      # Of what the devices found, which may be less than what was verified.
      num_levels=min(int(verdict.num_levels), num_drafted),
      num_accepted=end - 1,
      is_tree=verdict.tree is not None,
      outcome=outcome,
      num_forwards=num_forwards if outcome != types.NO_OUTCOME else 0,
      path=path,
      is_looked_up=is_looked_up[1:],
    )
    nodes, by_model = (), self._by_model
    if self.shows_drafts and num_drafted and verdict.tree is not None:
      nodes = draft_nodes.of_tree(drafted, num_drafted, path, by_model=by_model)
    elif self.shows_drafts and num_drafted:
      nodes = draft_nodes.of_chain(
        drafted[:num_drafted], end - 1, by_model=by_model
      )
    return self._push(report, logprobs, nodes)

  def _push(
    self,
    report: types.StepReport,
    logprobs: types.Logprobs | None,
    draft_nodes: tuple[DraftNode, ...] = (),
  ) -> list[int]:
    """Takes what a step says of this row; returns the output's new tokens.

    Args:
      report: outcome of the step for this row.
      logprobs: log-probabilities of this row on the host, without the leading
        axis.
      draft_nodes: draft tokens of this row, for a user who wants to see them.
    """
    num_before = len(self._row.token_ids)
    news = self._row.push(report, logprobs)
    self._send(*news, num_before, report.num_drafted, draft_nodes)
    return self._row.token_ids[num_before:]

  def cancel(self) -> None:
    """Ends the output where it is."""
    self._send(*self._row.cancel(), len(self._row.token_ids))

  def _send(
    self,
    text: str,
    result: GenerationResult | None,
    num_before: int,
    num_drafted: int = 0,
    draft_nodes: tuple[DraftNode, ...] = (),
  ) -> None:
    row = self._row
    self.handle.push(
      Update(
        token_ids=tuple(row.token_ids[num_before:]),
        text_offsets=row.text_offsets_from(num_before),
        logprobs=row.logprobs_from(num_before),
        top_logprobs=row.top_logprobs_from(num_before),
        text=text,
        pieces=row.pieces_from(num_before),
        num_drafted=num_drafted,
        draft_nodes=draft_nodes,
        result=result,
      )
    )
