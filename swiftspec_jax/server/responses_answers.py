"""Answers of /v1/responses."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from swiftspec_jax.engine.handles import Update
from swiftspec_jax.server import tool_calls
from swiftspec_jax.server.chat_answers import ChatFormat

_Event = dict[str, Any]
_STATUSES = {'length': 'incomplete', 'error': 'failed'}  # by finish reason
_BROKEN = {'code': 'server_error', 'message': 'no token fits the grammar'}


class ResponsesFormat(ChatFormat):
  """Answers of /v1/responses, of one choice; thoughts are left out."""

  _prefix = 'resp_'
  ending = ''

  def __init__(self, *args: Any, told_again: Mapping[str, Any]):
    """Chooses an id.

    Args:
      *args: arguments of other formats.
      told_again: fields of the request that answers have.
    """
    super().__init__(*args)
    self._told_again = told_again
    self._num_events = 0
    self._items: list[dict[str, Any]] = []  # the last one may be open
    self._is_open = False

  def encode(self, event):
    return f'event: {event.get("type", "error")}\ndata: {json.dumps(event)}\n\n'

  def whole(self, results):
    (result,) = results
    update = Update(token_ids=result.token_ids, text=result.text, result=result)
    return self.news(0, update)[-1]['response']

  def opening(self, num_choices):
    del num_choices
    response = self._response('in_progress')
    return [
      self._make(f'response.{name}', response=response)
      for name in ('created', 'in_progress')
    ]

  def news(self, index, update):
    result = update.result
    self._num_new_tokens += len(update.token_ids)
    parts = self._read(index, update.text, is_last=result is not None)
    events = [event for part in parts for event in self._of_part(part)]
    if result is not None:
      events += self._close()
      status = _STATUSES.get(result.finish_reason, 'completed')
      response = self._response(status)
      events.append(self._make(f'response.{status}', response=response))
    return events

  def _response(self, status: str) -> dict[str, Any]:
    is_cut = status == 'incomplete'
    return {
      **self._told_again,
      'id': self._head['id'],
      'object': 'response',
      'created_at': self._head['created'],
      'model': self._head['model'],
      'status': status,
      'output': [*self._items],
      'error': _BROKEN if status == 'failed' else None,
      'incomplete_details': {'reason': 'max_output_tokens'} if is_cut else None,
      'metadata': {},
      'store': False,
      'usage': None if status == 'in_progress' else self._token_usage(),
    }

  def _token_usage(self) -> dict[str, Any]:
    usage = self._usage()
    return {
      'input_tokens': usage['prompt_tokens'],
      'input_tokens_details': {'cached_tokens': 0},
      'output_tokens': usage['completion_tokens'],
      'output_tokens_details': {'reasoning_tokens': 0},
      'total_tokens': usage['total_tokens'],
    }

  def _make(self, kind: str, **fields: Any) -> _Event:
    self._num_events += 1
    return {'type': kind, 'sequence_number': self._num_events - 1, **fields}

  def _of_item(self, kind: str, **fields: Any) -> _Event:
    place = {'output_index': len(self._items) - 1}
    if not kind.startswith('output_item'):
      place['item_id'] = self._items[-1]['id']
    if kind.startswith(('output_text', 'content_part')):
      place['content_index'] = 0
    return self._make(f'response.{kind}', **place, **fields)

  def _of_part(self, part: tool_calls.Part) -> list[_Event]:
    if isinstance(part, tool_calls.TextPart):
      return [] if part.is_thought else self._of_text(part)
    events = []
    if part.name is not None:
      item = {
        'arguments': '',
        'call_id': tool_calls.new_id(),
        'name': part.name,
      }
      events += self._open('function_call', **item)
    if part.arguments:
      self._items[-1]['arguments'] += part.arguments
      events.append(
        self._of_item('function_call_arguments.delta', delta=part.arguments)
      )
    return events

  def _of_text(self, part: tool_calls.TextPart) -> list[_Event]:
    events = []
    if not (self._is_open and self._items[-1]['type'] == 'message'):
      events += self._open('message', role='assistant', content=[])
      content = {'type': 'output_text', 'text': '', 'annotations': []}
      events.append(self._of_item('content_part.added', part={**content}))
      self._items[-1]['content'].append(content)
    self._items[-1]['content'][0]['text'] += part.text
    events.append(
      self._of_item('output_text.delta', delta=part.text, logprobs=[])
    )
    return events

  def _open(self, kind: str, **fields: Any) -> list[_Event]:
    events = self._close()
    prefix = {'message': 'msg', 'function_call': 'fc'}[kind]
    item = {'id': f'{prefix}_{tool_calls.new_id()}', 'type': kind, **fields}
    self._items.append({**item, 'status': 'in_progress'})
    self._is_open = True
    return [*events, self._of_item('output_item.added', item=self._last())]

  def _close(self) -> list[_Event]:
    """Ends the item that is open."""
    if not self._is_open:
      return []
    self._is_open = False
    item = self._items[-1]
    item['status'] = 'completed'
    if item['type'] == 'message':
      (content,) = item['content']
      events = [
        self._of_item('output_text.done', text=content['text'], logprobs=[]),
        self._of_item('content_part.done', part=content),
      ]
    else:
      told = {'arguments': item['arguments'], 'name': item['name']}
      events = [self._of_item('function_call_arguments.done', **told)]
    return [*events, self._of_item('output_item.done', item=self._last())]

  def _last(self) -> dict[str, Any]:
    """Returns the last item as it is now."""
    return copy.deepcopy(self._items[-1])
