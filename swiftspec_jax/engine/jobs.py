"""Requests of an engine, and what has come of them."""

from swiftspec_jax import types
from swiftspec_jax.engine.handles import Handle, Update
from swiftspec_jax.requests import DraftNode, Event, Request, Row


class Job:
  """A request, its output, and the handle of its user.

  Attributes:
    handle: handle that gets the news.
    max_speculative_tokens: longest draft that the user wants, None for any.
    shows_drafts: whether the news have `draft_nodes`.
  """

  shows_drafts = False

  def __init__(
    self, row: Row, handle: Handle, max_speculative_tokens: int | None = None
  ):
    """Starts the clock of the first token."""
    self.handle = handle
    self.max_speculative_tokens = max_speculative_tokens
    self._row = row
    row.start()

  @property
  def request(self) -> Request:
    """What to decode."""
    return self._row.request

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

  def end_prefill(self, num_tokens: int = 0) -> None:
    """Starts the clock of decoding, as `Row.end_prefill` does."""
    self._row.end_prefill(num_tokens)

  def push(
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
    event = self._row.push(report, logprobs)
    self._send(event, num_before, report.num_drafted, draft_nodes)
    return self._row.token_ids[num_before:]

  def cancel(self) -> None:
    """Ends the output where it is."""
    self._send(self._row.cancel(), len(self._row.token_ids))

  def _send(
    self,
    event: Event | None,
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
        text='' if event is None else event.text,
        pieces=row.pieces_from(num_before),
        num_drafted=num_drafted,
        draft_nodes=draft_nodes,
        result=None if event is None else event.result,
      )
    )
