"""Answers of /v1/chat/completions."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from swiftspec_jax.server import answer_types, answers, tool_calls


class ChatFormat(answers.Format):
  """Answers of /v1/chat/completions."""

  _prefix, _whole = 'chatcmpl-', 'chat.completion'
  _part = 'chat.completion.chunk'
  _empty: ClassVar = {'delta': {'content': ''}}
  _opening: ClassVar = {'delta': {'role': 'assistant', 'content': ''}}

  def __init__(self, service, body, requests):
    super().__init__(service, body, requests)
    self._make_reader: Callable[[], tool_calls.Reader] | None = None
    self._only_first_call = not body.parallel_tool_calls
    self._readers: dict[int, tool_calls.Reader] = {}  # by choice
    self._callers: set[int] = set()  # choices with calls
    if body.offered_tools:
      self._make_reader = tool_calls.make_reader(
        service.call_format,
        service.model.tokenizer,
        requests[0].token_ids,
        body.template_options.tools,
      )

  def _message(self, index, text):
    parts = self._read(index, text, is_last=True)
    return {'message': {'role': 'assistant', 'refusal': None, **_joined(parts)}}

  def _deltas(self, index, text, is_last):
    parts = self._read(index, text, is_last)
    return [{'delta': _delta(part)} for part in parts]

  def _read(
    self, index: int, text: str, is_last: bool
  ) -> Iterable[tool_calls.Part]:
    if self._make_reader is None:
      yield from [tool_calls.TextPart(text=text)] if text else []
      return
    if index not in self._readers:
      self._readers[index] = self._make_reader()
    for part in self._readers[index].push(text, is_last=is_last):
      if isinstance(part, tool_calls.CallPart):
        if self._only_first_call and part.index:
          continue
        self._callers.add(index)
      yield part

  def _finish_reason(self, index, result):
    reason = super()._finish_reason(index, result)
    is_call = reason == 'stop' and index in self._callers
    return 'tool_calls' if is_call else reason

  def _logprobs(self, chosen, top, offsets):
    del offsets
    content = [
      {**_entry(pair), 'top_logprobs': list(map(_entry, others))}
      for pair, others in zip(chosen, top or [()] * len(chosen), strict=True)
    ]
    return {'content': content, 'refusal': None}


def _joined(parts: Iterable[tool_calls.Part]) -> dict[str, Any]:
  """Returns what a whole message has of its parts."""
  texts: dict[str, str] = {}
  calls: list[answer_types.ToolCall] = []
  for part in parts:
    if isinstance(part, tool_calls.TextPart):
      texts[part.field] = texts.get(part.field, '') + part.text
    elif part.name is None:
      calls[-1]['function']['arguments'] += part.arguments
    else:
      calls.append(_call(part))
  if not calls:
    return {'content': '', **texts}
  return {'content': None, **texts, 'tool_calls': calls}


def _delta(part: tool_calls.Part) -> dict[str, Any]:
  """Returns what an event has of a part."""
  if isinstance(part, tool_calls.TextPart):
    return {part.field: part.text}
  if part.name is None:
    call: dict[str, Any] = {'function': {'arguments': part.arguments}}
  else:
    call = _call(part)
  return {'tool_calls': [{'index': part.index, **call}]}


def _call(part: tool_calls.CallPart) -> answer_types.ToolCall:
  return {
    'id': tool_calls.new_id(),
    'type': 'function',
    'function': {'name': part.name, 'arguments': part.arguments},
  }


def _entry(named: answers.Named) -> answer_types.TopLogprob:
  name, logprob = named
  encoded = None if name.encoded is None else list(name.encoded)
  return {'token': name.text, 'logprob': logprob, 'bytes': encoded}
