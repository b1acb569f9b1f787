"""Calls of tools in the text of a model."""

import dataclasses
import json
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import regex  # it can match the start of what may come, unlike `re`

from swiftspec_jax import errors
from swiftspec_jax.tokenizer import Tokenizer

# Arguments start with the brace that the look-ahead leaves; some have none.
_JSON = (
  r'\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*'
  r'(?:,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)|(?=\}))'
)
_NAMED = (
  r'\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)'
)
_STRING_OR_BRACKET = regex.compile(
  r'"(?:[^"\\]|\\.)*+(?P<end>"|\\?\Z)|[{}[\]]', regex.DOTALL
)
_ID_LENGTH = 9  # Mistral's templates take no other


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFormat:
  """How models write a call: as JSON arguments between two patterns.

  Attributes:
    head: pattern of what comes before the arguments, with the group `name`;
      found anywhere.
    further: pattern of the same directly after a call.
    tail: pattern of what comes after the arguments.
    shown_by: pattern that templates have, in the source or as text.
  """

  head: regex.Pattern
  further: regex.Pattern
  tail: regex.Pattern
  shown_by: regex.Pattern


DECLARED = 'response_template'  # by the tokenizer
# By the names that vLLM gives to its parsers.
FORMATS: Mapping[str, CallFormat] = {
  'hermes': CallFormat(
    # Small models leave out the marks, or write a block of code.
    head=regex.compile(rf'(?:\A\s*(?:```(?:json)?)?|\s*<tool_call>)\s*{_JSON}'),
    further=regex.compile(rf'\s*(?:<tool_call>\s*)?{_JSON}'),
    tail=regex.compile(r'\s*\}\s*(?:</tool_call>|```|(?=[^<`\s]))'),
    shown_by=regex.compile(r'<tool_call>(?:\\n|\s)*\{'),
  ),
  'llama3_json': CallFormat(
    head=regex.compile(rf'(?:\A|\s*<\|python_tag\|>)\s*{_JSON}'),
    further=regex.compile(rf'\s*;\s*{_JSON}'),
    tail=regex.compile(r'\s*\}'),
    shown_by=regex.compile(r'"parameters\\?": dictionary'),
  ),
  'mistral': CallFormat(
    head=regex.compile(rf'\s*(?|\[TOOL_CALLS\]\s*\[\s*{_JSON}|{_NAMED})'),
    further=regex.compile(rf'\s*(?|,\s*{_JSON}|{_NAMED})'),
    tail=regex.compile(r'\s*(?:,\s*"id"\s*:\s*"\w*"\s*)?\}(?:\s*\]|(?=\s*,))'),
    shown_by=regex.compile(r'\[TOOL_CALLS\]'),
  ),
}
_RESTS = ('', '}')  # of a call: the brace ends one without marks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPart:
  """Text for people.

  Attributes:
    text: the text.
    is_thought: whether it comes before what the model answers.
  """

  text: str
  is_thought: bool = False

  @property
  def field(self) -> str:
    """The field of a message that has it."""
    return 'reasoning_content' if self.is_thought else 'content'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallPart:
  """News of a call.

  Attributes:
    index: number of the call in the answer.
    name: name of the tool, in the first part of a call; None in others.
    arguments: more of the JSON text of the arguments.
  """

  index: int
  name: str | None = None
  arguments: str = ''


Part: TypeAlias = TextPart | CallPart


class CallReader:
  """Finds calls in a format.

  What is no call is content, and so is a call with a mistake before its
  arguments. White space beside calls is dropped.
  """

  def __init__(self, call_format: CallFormat):
    self._format = call_format
    self._text = ''
    self._start = 0  # of what is not in a part yet
    self._is_last = False
    self._parts: list[Part] = []
    self._num_calls = 0
    self._steps = self._read()

  def push(self, text: str, *, is_last: bool = False) -> list[Part]:
    """Takes more of the text; returns what is now certain."""
    self._text += text
    self._is_last = is_last
    self._parts = []
    next(self._steps, None)
    return self._parts

  def _read(self) -> Iterator[None]:
    """Reads to the end of the text so far with each `next`."""
    match = yield from self._find(self._format.head)
    while match:
      self._parts.append(CallPart(index=self._num_calls, name=match['name']))
      yield from self._read_arguments()
      self._num_calls += 1
      yield from self._skip(self._format.tail)
      match = yield from self._skip(self._format.further)
      if not match:
        match = yield from self._find(self._format.head)

  def _find(
    self, pattern: regex.Pattern
  ) -> Generator[None, None, regex.Match | None]:
    """Makes content of all text before a match; None: there is none."""
    while True:
      match = self._search(pattern.search)
      text = self._take(match.start() if match else len(self._text))
      is_rest = self._num_calls and text.strip() in _RESTS
      if text and not is_rest:
        self._parts.append(TextPart(text=text))
      if match and not match.partial:
        self._start = match.end()
        return match
      if self._is_last:
        return None
      yield

  def _skip(
    self, pattern: regex.Pattern
  ) -> Generator[None, None, regex.Match | None]:
    """Skips what matches here; None: nothing does."""
    while (match := self._search(pattern.match)) and match.partial:
      yield
    if match:
      self._start = match.end()
    return match

  def _search(self, method) -> regex.Match | None:
    return method(self._text, self._start, partial=not self._is_last)

  def _read_arguments(self) -> Iterator[None]:
    depth, start = 0, self._start
    while True:
      for token in _STRING_OR_BRACKET.finditer(self._text, start):
        if token['end'] not in (None, '"'):
          break  # the string goes on
        depth += (token[0] in '{[') - (token[0] in '}]')
        if depth <= 0:
          # A brace that closes the call: there are no arguments.
          arguments = self._take(token.end()) if depth == 0 else '{}'
          self._add_arguments(arguments)
          return
        start = token.end()
      self._add_arguments(self._take(len(self._text)))
      if self._is_last:
        return
      yield

  def _add_arguments(self, text: str) -> None:
    if text:
      self._parts.append(CallPart(index=self._num_calls, arguments=text))

  def _take(self, end: int) -> str:
    """Returns the text up to a place, and goes on there."""
    taken, self._start = self._text[self._start : end], end
    return taken


class DeclaredReader:
  """Reads what a tokenizer of transformers declares as `response_template`.

  A call is there when all of it is. From one that cannot be parsed on, all is
  content.
  """

  def __init__(self, parser: Any):
    """Starts an empty text.

    Args:
      parser: parser of a response, as `get_response_parser` returns it.
    """
    self._parser = parser
    self._num_calls = 0
    self._unparsed = ''

  def push(self, text: str, *, is_last: bool = False) -> list[Part]:
    """Takes more of the text; returns what is now certain."""
    if self._parser is None:
      return [TextPart(text=text)] if text else []
    try:
      events = self._parser.feed(text)
      if is_last:
        events += self._parser.finalize()[1]
      return [part for event in events for part in self._parts(event)]
    except (KeyError, TypeError, ValueError):  # it is no call
      self._parser = None
      return [TextPart(text=self._unparsed + text)]

  def _parts(self, event: Mapping[str, Any]) -> Iterator[Part]:
    match event:
      case {'type': 'region_chunk', 'dirty': True, 'text': text}:
        self._unparsed += text
      case {'type': 'region_chunk', 'field': field, 'text': text}:
        yield TextPart(text=text, is_thought=field != 'content')
      case {'type': 'region_close', 'field': 'tool_calls', 'value': value}:
        self._unparsed = ''
        for call in value if isinstance(value, list) else [value]:
          function = call['function']
          yield CallPart(
            index=self._num_calls,
            name=function['name'],
            arguments=json.dumps(function['arguments'], ensure_ascii=False),
          )
          self._num_calls += 1


Reader: TypeAlias = CallReader | DeclaredReader


def format_of(tokenizer: Tokenizer) -> str | None:
  """Returns the format that the chat template for tools shows; None: none."""
  if getattr(tokenizer, 'response_template', None):
    return DECLARED
  if tokenizer.chat_template is None:
    return None
  template = tokenizer.get_chat_template(tools=[])
  shown = (name for name, x in FORMATS.items() if x.shown_by.search(template))
  return next(shown, None)


def make_reader(
  format_name: str | None,
  tokenizer: Tokenizer,
  token_ids: Sequence[int],
  tools: Sequence[Mapping[str, Any]],
) -> Callable[[], Reader]:
  """Returns a function that returns a reader for each answer to a prompt.

  Args:
    format_name: key of `FORMATS`, or `DECLARED`.
    tokenizer: tokenizer of the model.
    token_ids: tokens of the prompt.
    tools: tools that the prompt offers.

  Raises:
    UserError: there is no format.
  """
  if format_name is None:
    raise errors.UserError(
      'how this model writes calls of tools is not known; start the server '
      f'with --tool_call_parser={"|".join(FORMATS)}'
    )
  if format_name != DECLARED:
    return lambda: CallReader(FORMATS[format_name])
  prefix = tokenizer.decode(token_ids)
  return lambda: DeclaredReader(
    tokenizer.get_response_parser(prefix=prefix, tools=list(tools))
  )


def new_id() -> str:
  """Returns an id of a call."""
  return secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
