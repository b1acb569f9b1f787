"""Answers in OpenAI's formats, at once or in parts."""

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import swiftspec_jax as ss
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.requests import DraftNode
from swiftspec_jax.requests.results import GenerationResult
from swiftspec_jax.server import answer_types
from swiftspec_jax.server.schema import Body
from swiftspec_jax.server.service import Service
from swiftspec_jax.tokenizer import token_names
from swiftspec_jax.tokenizer.token_names import TokenName
from swiftspec_jax.tree import types

# JSON has no infinity; this is what vLLM says instead.
_LEAST_LOGPROB = -9999.0
Named = tuple[TokenName, float]  # a token and its log-probability


class Format:
  """How an endpoint answers one request."""

  _prefix: str  # of ids
  _whole: str  # name of the whole answer
  _part: str  # and of an event of a stream
  _empty: Mapping[str, Any]  # content of an event without any
  # Content of each choice before the first news; None: there is no such event.
  _opening: Mapping[str, Any] | None = None
  ending = 'data: [DONE]\n\n'  # of a stream

  def __init__(
    self, service: Service, body: Body, requests: Sequence[ss.Request]
  ):
    """Chooses an id.

    Args:
      service: model that answers, and its name.
      body: fields of the call.
      requests: requests of the call, prompts times n.
    """
    self._names = token_names.of(service.model.tokenizer)
    self._n = body.n
    self._options = body.stream_options
    self._num_prompt_tokens = sum(
      len(request.token_ids) for request in requests[:: body.n]
    )
    self._num_new_tokens = 0  # in the events so far
    self._head = {
      'id': f'{self._prefix}{uuid.uuid4().hex}',
      'created': int(time.time()),
      'model': service.name,
      'system_fingerprint': f'swiftspec_jax-{ss.__version__}',
    }

  def rate(self, ratings: Sequence[types.Logprobs]) -> None:
    """Takes the log-probabilities of prompts, which come before all else."""

  def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Returns the answer."""
    choices = [
      self._choice(i, self._message(i, result.text), result, result)
      for i, result in enumerate(results)
    ]
    self._num_new_tokens = sum(result.stats.new_tokens for result in results)
    return {
      **self._head,
      'object': self._whole,
      'choices': choices,
      'usage': self._usage(),
    }

  def encode(self, event: Mapping[str, Any]) -> str:
    """Returns an event as servers send it."""
    return f'data: {json.dumps(event)}\n\n'

  def opening(self, num_choices: int) -> list[dict[str, Any]]:
    """Returns the events before the first news."""
    if self._opening is None:
      return []
    return [
      self._event(self._choice(i, self._opening, Update(), None))
      for i in range(num_choices)
    ]

  def news(self, index: int, update: Update) -> list[dict[str, Any]]:
    """Returns events; none if their reader would learn nothing."""
    self._num_new_tokens += len(update.token_ids)
    is_told = self._options.include_speculation and update.token_ids
    is_last = update.result is not None
    *before, delta = self._deltas(index, update.text, is_last) or [self._empty]
    if delta is self._empty and not (update.logprobs or is_last or is_told):
      return []
    choice = self._choice(index, delta, update, update.result)
    if is_told:
      choice['speculation'] = self._speculation(update)
    choices = [self._choice(index, x, Update(), None) for x in before]
    return [self._event(choice) for choice in (*choices, choice)]

  def closing(self) -> dict[str, Any]:
    """Returns the event with the numbers of tokens."""
    return {**self._event(), 'usage': self._usage()}

  def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
    event = {**self._head, 'object': self._part, 'choices': choices}
    if self._options.continuous_usage_stats:
      event['usage'] = self._usage()
    elif self._options.include_usage:
      event['usage'] = None
    return event

  def _choice(
    self,
    index: int,
    content: dict[str, Any],
    tokens: Update | GenerationResult,
    result: GenerationResult | None,
  ) -> dict[str, Any]:
    logprobs = None
    if tokens.logprobs is not None:
      chosen = zip(tokens.token_ids, tokens.logprobs, strict=True)
      logprobs = self._logprobs(
        self._named(chosen),
        None
        if tokens.top_logprobs is None
        else [self._named(top) for top in tokens.top_logprobs],
        tokens.text_offsets,
      )
    return {
      'index': index,
      **content,
      'logprobs': logprobs,
      'finish_reason': self._finish_reason(index, result),
      'stop_reason': result and result.stop_reason,
    }

  def _named(self, pairs: Iterable[tuple[int, float]]) -> list[Named]:
    return [
      (self._names[token_id], max(value, _LEAST_LOGPROB))
      for token_id, value in pairs
    ]

  def _finish_reason(
    self, index: int, result: GenerationResult | None
  ) -> str | None:
    del index
    return result and result.finish_reason

  def _usage(self) -> answer_types.Usage:
    return {
      'prompt_tokens': self._num_prompt_tokens,
      'completion_tokens': self._num_new_tokens,
      'total_tokens': self._num_prompt_tokens + self._num_new_tokens,
    }

  def _speculation(self, update: Update) -> answer_types.Speculation:
    pieces = [
      {'text': piece.text, 'source': piece.source.value}
      for piece in update.pieces
    ]
    found = {'num_drafted': update.num_drafted, 'pieces': pieces}
    if self._options.include_draft_nodes:
      found['draft_nodes'] = [self._node(node) for node in update.draft_nodes]
    return found

  def _node(self, node: DraftNode) -> answer_types.DraftNode:
    return {
      'text': self._names[node.token_id].text,
      'parent': node.parent,
      'source': node.source.value,
      'prob': None if node.prob is None else round(node.prob, 4),
      'is_accepted': node.is_accepted,
    }

  def _message(self, index: int, text: str) -> dict[str, Any]:
    """Returns the content of a whole choice."""
    raise NotImplementedError

  def _deltas(
    self, index: int, text: str, is_last: bool
  ) -> list[dict[str, Any]]:
    """Returns the contents of the next parts of a choice."""
    raise NotImplementedError

  def _logprobs(
    self,
    chosen: Sequence[Named],
    top: Sequence[Sequence[Named]] | None,
    offsets: Sequence[int],
  ) -> dict[str, Any]:
    """Returns what is said of tokens, and of the most probable ones."""
    raise NotImplementedError
