"""Answers in OpenAI's formats, at once or in parts."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax import types
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.requests import DraftNode
from swiftspec_jax.results import GenerationResult
from swiftspec_jax.server import answer_types
from swiftspec_jax.server.echo import Echo
from swiftspec_jax.tokenizer import token_names
from swiftspec_jax.tokenizer.token_names import TokenName

# JSON has no infinity; this is what vLLM says instead.
_LEAST_LOGPROB = -9999.0
_Named = tuple[TokenName, float]  # a token and its log-probability


class Format:
  """How an endpoint answers one request."""

  _prefix: str  # of ids
  _whole: str  # name of the whole answer
  _part: str  # and of an event of a stream

  def __init__(
    self,
    model: str,
    tokenizer: tokenizer_lib.Tokenizer,
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
    self._names = token_names.of(tokenizer)
    self._n = n
    self._include_speculation = include_speculation
    self._include_draft_nodes = include_draft_nodes
    self._head = {
      'id': f'{self._prefix}{uuid.uuid4().hex}',
      'created': int(time.time()),
      'model': model,
    }

  def rate(self, ratings: Sequence[types.Logprobs]) -> None:
    """Takes the log-probabilities of prompts, which come before all else."""

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
      'finish_reason': result and result.finish_reason,
      'stop_reason': result and result.stop_reason,
    }

  def _named(self, pairs: Iterable[tuple[int, float]]) -> list[_Named]:
    return [
      (self._names[token_id], max(value, _LEAST_LOGPROB))
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
      'text': self._names[node.token_id].text,
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
    chosen: Sequence[_Named],
    top: Sequence[Sequence[_Named]] | None,
    offsets: Sequence[int],
  ) -> dict[str, Any]:
    """Returns what is said of tokens, and of the most probable ones."""
    raise NotImplementedError


class CompletionFormat(Format):
  """Answers of /v1/completions."""

  _prefix, _whole, _part = 'cmpl-', 'text_completion', 'text_completion'

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._echoes: Sequence[Echo] = ()
    self._ratings: Sequence[types.Logprobs] = ()
    self._begun: set[int] = set()  # choices whose prompt is told

  def start_with(self, echoes: Iterable[Echo]) -> None:
    """Has texts begin with these prompts."""
    self._echoes = list(echoes)

  def rate(self, ratings):
    self._ratings = ratings

  def opening(self, num_choices):
    if not self._echoes:
      return []
    message = self._message('')
    return [
      self._event(self._choice(i, message, Update(), None))
      for i in range(num_choices)
    ]

  def _message(self, text):
    return {'text': text}

  _delta = _message

  def _choice(self, index, content, tokens, result):
    choice = super()._choice(index, content, tokens, result)
    if not self._echoes:
      return choice
    number = index // self._n
    echo = self._echoes[number]
    own = choice['logprobs']
    if own is not None:
      own['text_offset'] = [len(echo.text) + x for x in own['text_offset']]
    if index in self._begun:
      return choice
    self._begun.add(index)
    choice['text'] = echo.text + choice['text']
    if self._ratings:
      of_prompt = self._of_prompt(echo, self._ratings[number])
      choice['logprobs'] = of_prompt if own is None else _join(of_prompt, own)
    return choice

  def _of_prompt(
    self, echo: Echo, rating: types.Logprobs
  ) -> answer_types.CompletionLogprobs:
    """Returns what is said of the tokens of a prompt, nothing of the first."""
    chosen = zip(echo.token_ids[1:], rating.chosen.tolist(), strict=True)
    top = None
    if echo.num_top:
      pairs = zip(
        rating.top_token_ids[:, : echo.num_top].tolist(),
        rating.top[:, : echo.num_top].tolist(),
        strict=True,
      )
      top = [self._named(zip(*pair, strict=True)) for pair in pairs]
    found = self._logprobs(self._named(chosen), top, echo.offsets)
    found['tokens'].insert(0, self._names[echo.token_ids[0]].text)
    found['token_logprobs'].insert(0, None)
    if top is not None:
      found['top_logprobs'].insert(0, None)
    return found

  def _logprobs(self, chosen, top, offsets):
    names = [name.text for name, _ in chosen]
    values = [value for _, value in chosen]
    if top is not None:
      # With the token itself, which need not be among the most probable.
      top = [
        {**{name.text: value for name, value in pairs}, name: value}
        for name, value, pairs in zip(names, values, top, strict=True)
      ]
    return {
      'tokens': names,
      'token_logprobs': values,
      'top_logprobs': top,
      'text_offset': list(offsets),
    }


def _join(
  first: answer_types.CompletionLogprobs,
  second: answer_types.CompletionLogprobs,
) -> answer_types.CompletionLogprobs:
  """Returns the entries of both; either both have `top_logprobs`, or none."""
  return {key: values and values + second[key] for key, values in first.items()}


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

  def _logprobs(self, chosen, top, offsets):
    del offsets
    content = [
      {**_entry(pair), 'top_logprobs': list(map(_entry, others))}
      for pair, others in zip(chosen, top or [()] * len(chosen), strict=True)
    ]
    return {'content': content, 'refusal': None}


def _entry(named: _Named) -> answer_types.TopLogprob:
  name, logprob = named
  encoded = None if name.encoded is None else list(name.encoded)
  return {'token': name.text, 'logprob': logprob, 'bytes': encoded}
