"""Answers in OpenAI's formats, at once or in parts."""

import collections
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import transformers

from swiftspec_jax.engine.handles import Update
from swiftspec_jax.requests import DraftNode
from swiftspec_jax.results import GenerationResult
from swiftspec_jax.server import answer_types

# JSON has no infinity; this is what vLLM says instead.
_LEAST_LOGPROB = -9999.0
_BROKEN = '\ufffd'  # what bytes that are no character are decoded to
_Named = tuple[str, float]  # a token and its log-probability


class Format:
  """How an endpoint answers one request."""

  _prefix: str  # of ids
  _whole: str  # name of the whole answer
  _part: str  # and of an event of a stream

  def __init__(
    self,
    model: str,
    tokenizer: transformers.PreTrainedTokenizerFast,
    n: int,
    include_speculation: bool = False,
    include_draft_nodes: bool = False,
  ):
    """Chooses an id.

    Args:
      model: name in the answer.
      tokenizer: tokenizer of the model.
      n: choices of each prompt.
      include_speculation: whether events tell who proposed each token.
      include_draft_nodes: whether they then have all draft tokens, too.
    """
    self._tokenizer = tokenizer
    self._n = n
    self._include_speculation = include_speculation
    self._include_draft_nodes = include_draft_nodes
    self._head = {
      'id': f'{self._prefix}{uuid.uuid4().hex}',
      'created': int(time.time()),
      'model': model,
    }

  def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Returns the answer."""
    choices = [
      self._choice(i, self._message(result.text), result, result)
      for i, result in enumerate(results)
    ]
    return {
      **self._head,
      'object': self._whole,
      'choices': choices,
      'usage': self._usage(results),
    }

  def opening(self, num_choices: int) -> list[dict[str, Any]]:
    """Returns the events before the first news."""
    del num_choices
    return []

  def news(self, index: int, update: Update) -> dict[str, Any] | None:
    """Returns an event; None if its reader would learn nothing."""
    is_told = self._include_speculation and update.token_ids
    if not (update.text or update.logprobs or update.result or is_told):
      return None
    delta = self._delta(update.text)
    choice = self._choice(index, delta, update, update.result)
    if is_told:
      choice['speculation'] = self._speculation(update)
    return self._event(choice)

  def closing(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Returns the event with the numbers of tokens."""
    return {**self._event(), 'usage': self._usage(results)}

  def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
    return {**self._head, 'object': self._part, 'choices': choices}

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
        index,
        self._named(chosen),
        None
        if tokens.top_logprobs is None
        else [self._named(top) for top in tokens.top_logprobs],
      )
    return {
      'index': index,
      **content,
      'logprobs': logprobs,
      'finish_reason': result and result.finish_reason,
      'stop_reason': result and result.stop_reason,
    }

  def _named(self, pairs: Iterable[tuple[int, float]]) -> list[_Named]:
    return [
      (self._tokenizer.decode([token_id]), max(value, _LEAST_LOGPROB))
      for token_id, value in pairs
    ]

  def _usage(self, results: Sequence[GenerationResult]) -> answer_types.Usage:
    prompt = sum(result.stats.prompt_tokens for result in results[:: self._n])
    completion = sum(result.stats.new_tokens for result in results)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': completion,
      'total_tokens': prompt + completion,
    }

  def _speculation(self, update: Update) -> answer_types.Speculation:
    pieces = [
      {'text': piece.text, 'source': piece.source.value}
      for piece in update.pieces
    ]
    found = {'num_drafted': update.num_drafted, 'pieces': pieces}
    if self._include_draft_nodes:
      found['draft_nodes'] = [self._node(node) for node in update.draft_nodes]
    return found

  def _node(self, node: DraftNode) -> answer_types.DraftNode:
    return {
      'text': self._tokenizer.decode([node.token_id]),
      'parent': node.parent,
      'source': node.source.value,
      'prob': None if node.prob is None else round(node.prob, 4),
      'is_accepted': node.is_accepted,
    }

  def _message(self, text: str) -> dict[str, Any]:
    """Returns the content of a whole choice."""
    raise NotImplementedError

  def _delta(self, text: str) -> dict[str, Any]:
    """Returns the content of a part of a choice."""
    raise NotImplementedError

  def _logprobs(
    self,
    index: int,
    chosen: Sequence[_Named],
    top: Sequence[Sequence[_Named]] | None,
  ) -> dict[str, Any]:
    """Returns what is said of tokens, and of the most probable ones."""
    raise NotImplementedError


class CompletionFormat(Format):
  """Answers of /v1/completions."""

  _prefix, _whole, _part = 'cmpl-', 'text_completion', 'text_completion'

  def __init__(self, *args: Any):
    super().__init__(*args)
    # Characters of the tokens of each choice so far.
    self._offsets = collections.Counter()

  def _message(self, text):
    return {'text': text}

  _delta = _message

  def _logprobs(self, index, chosen, top):
    offsets = []
    for token, _ in chosen:
      offsets.append(self._offsets[index])
      self._offsets[index] += len(token)
    return {
      'tokens': [token for token, _ in chosen],
      'token_logprobs': [value for _, value in chosen],
      'top_logprobs': None if top is None else [dict(pairs) for pairs in top],
      'text_offset': offsets,
    }


class ChatFormat(Format):
  """Answers of /v1/chat/completions."""

  _prefix, _whole = 'chatcmpl-', 'chat.completion'
  _part = 'chat.completion.chunk'

  def opening(self, num_choices):
    message = {'delta': {'role': 'assistant', 'content': ''}}
    return [
      self._event(self._choice(i, message, Update(), None))
      for i in range(num_choices)
    ]

  def _message(self, text):
    message = {'role': 'assistant', 'content': text, 'refusal': None}
    return {'message': message}

  def _delta(self, text):
    return {'delta': {'content': text}}

  def _logprobs(self, index, chosen, top):
    del index
    content = [
      {**_entry(pair), 'top_logprobs': list(map(_entry, others))}
      for pair, others in zip(chosen, top or [()] * len(chosen), strict=True)
    ]
    return {'content': content, 'refusal': None}


def _entry(named: _Named) -> answer_types.TopLogprob:
  token, logprob = named
  # A part of a character has no text of its own.
  encoded = None if _BROKEN in token else list(token.encode())
  return {'token': token, 'logprob': logprob, 'bytes': encoded}
