"""Grammars of outputs: what may come next, and what must.

A matcher of llguidance says where in its grammar an output is. It takes a token
in microseconds and tells all allowed ones in some fifty, so that every node of
a draft can have a matcher of its own. Only copies are asked: what looks ahead
may be too complex for a matcher, which takes no token after that, and an output
must not depend on who has asked.

Legend: V vocabulary, W = ceil(V / 32) words of a mask.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import StructuredOutputs
from swiftspec_jax.models.model import Model

if TYPE_CHECKING:
  import llguidance

  from swiftspec_jax.tokenizer.chat_template import Tokenizer

# White space that is certain leaves more tokens that are.
JSON_STYLE = {
  'whitespace_flexible': False,
  'item_separator': ', ',
  'key_separator': ': ',
}
# A thousand take a mebibyte or two; the default takes half a gibibyte.
_MAX_LEXER_STATES = 20_000
_NUM_KEPT = 64  # compiled grammars
# Fields of a schema that hold others; definitions first, where errors are that
# show wherever they are referred to.
_DEFINITIONS = '$defs', 'definitions'
_MAPS = *_DEFINITIONS, 'properties', 'patternProperties', 'dependentSchemas'
_LISTS = 'prefixItems', 'anyOf', 'allOf', 'oneOf'
_SINGLE = 'items', 'additionalProperties', 'additionalItems', 'not'
_SECONDS_OF_SEARCH = 0.5
# Tokens that a grammar leaves a choice of: before and after those are left out
# that others begin with.
_MOST_ALLOWED, _MOST_BRANCHES = 64, 8
ROOT = -1  # parent of the first nodes of a draft


def start(wanted: StructuredOutputs, model: Model) -> 'llguidance.LLMatcher':
  """Returns a matcher at the start of an output.

  Raises:
    UserError: the grammar is wrong, or too large to compile; or llguidance is
      not installed, or cannot read the model's tokenizer.
  """
  return _compiled(wanted, vocabulary_of(model)).deep_copy()


def vocabulary_of(model: Model) -> 'llguidance.LLTokenizer':
  """Returns the tokens of a model, as `start` wants them."""
  end_token_ids = [
    token_id
    for token_id in (*model.config.eos_token_ids, model.tokenizer.eos_token_id)
    if token_id is not None and 0 <= token_id < model.config.vocab_size
  ]
  if not end_token_ids:
    raise errors.UserError(
      f'structured_outputs needs a token that ends outputs, and {model.name} '
      'has none'
    )
  return _vocabulary(
    model.tokenizer, model.config.vocab_size, tuple(end_token_ids)
  )


@functools.lru_cache(_NUM_KEPT)
def _compiled(
  wanted: StructuredOutputs, vocabulary: 'llguidance.LLTokenizer'
) -> 'llguidance.LLMatcher':
  kind, text = wanted.kind, getattr(wanted, wanted.kind)
  with errors.explained(f'structured_outputs.{kind}: ', ValueError):
    if kind not in ('json', 'json_object'):
      text = json.dumps(text) if kind == 'choice' else text
      return _match(_library().grammar_from(kind, text), vocabulary)
    schema = json.loads(text) if kind == 'json' else {'type': 'object'}
    if not isinstance(schema, Mapping):
      raise ValueError(f'a schema is an object, got {text}')
  try:
    return _match_schema(schema, vocabulary)
  except ValueError as error:
    definitions = {x: schema[x] for x in _DEFINITIONS if x in schema}
    end = time.monotonic() + _SECONDS_OF_SEARCH
    place = _place(schema, str(error), definitions, vocabulary, end)
    raise errors.UserError(
      f'structured_outputs.{kind}, at {place or "its top"}: {error}'
    ) from error


def _library() -> Any:
  try:
    import llguidance
  except ImportError as error:
    raise errors.UserError(
      'structured_outputs needs llguidance; pip install llguidance'
    ) from error
  return llguidance


@functools.lru_cache(4)
def _vocabulary(
  tokenizer: 'Tokenizer', vocab_size: int, end_token_ids: tuple[int, ...]
) -> 'llguidance.LLTokenizer':
  _library()
  from llguidance import hf

  unreadable = 'structured_outputs cannot read this tokenizer: '
  with errors.explained(unreadable, ValueError):
    return hf.from_tokenizer(
      tokenizer, n_vocab=vocab_size, eos_token=list(end_token_ids)
    )


def _match(
  grammar: str, vocabulary: 'llguidance.LLTokenizer'
) -> 'llguidance.LLMatcher':
  """Raises ValueError for a grammar that is wrong or too large."""
  library = _library()
  limits = library.LLParserLimits(
    max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
  )
  matcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
  if matcher.is_error():
    raise ValueError(matcher.get_error())
  return matcher


def _match_schema(
  schema: Any, vocabulary: 'llguidance.LLTokenizer'
) -> 'llguidance.LLMatcher':
  matcher = _library().LLMatcher
  grammar = matcher.grammar_from_json_schema(
    json.dumps(schema), defaults=JSON_STYLE
  )
  return _match(grammar, vocabulary)


def _place(
  schema: Any,
  message: str,
  definitions: Mapping[str, Any],
  vocabulary: 'llguidance.LLTokenizer',
  end: float,
) -> str:
  """Returns the path to the innermost part of a schema with an error.

  Args:
    schema: schema that has it.
    message: words of llguidance for it.
    definitions: fields of the whole schema that its parts refer to.
    vocabulary: tokens.
    end: time of `time.monotonic` after which nothing is tried.
  """
  for path, part in _parts(schema):
    if time.monotonic() > end:
      break
    try:
      _match_schema({**definitions, **part}, vocabulary)
    except ValueError as error:
      if str(error) == message:
        return path + _place(part, message, definitions, vocabulary, end)
  return ''


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping]]:
  """Yields the schemas right inside of one, with their paths."""
  for name in _MAPS + _LISTS + _SINGLE:
    value = schema.get(name)
    if name in _SINGLE:
      parts = {f'/{name}': value}
    elif isinstance(value, Mapping):
      parts = {f'/{name}/{key}': part for key, part in value.items()}
    elif isinstance(value, list):
      parts = {f'/{name}/{i}': part for i, part in enumerate(value)}
    else:
      parts = {}
    yield from ((k, v) for k, v in parts.items() if isinstance(v, Mapping))


def advance(matcher: 'llguidance.LLMatcher', token_ids: Sequence[int]) -> int:
  """Takes tokens up to one after which there can be no other.

  Returns:
    How many these are.
  """
  for i, token_id in enumerate(token_ids):
    if not matcher.consume_token(token_id) or matcher.is_stopped():
      return i + 1
  return len(token_ids)


def finish_reason(matcher: 'llguidance.LLMatcher') -> str | None:
  """Returns why an output ends here, as in `GenerationResult`, or None."""
  if matcher.is_error():
    return 'error'
  return 'stop' if matcher.is_stopped() else None


def forced(matcher: 'llguidance.LLMatcher') -> list[int]:
  """Returns the tokens that must come next."""
  return matcher.deep_copy().compute_ff_tokens()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """A tree of n draft tokens that a grammar allows; parents stand first.

  Attributes:
    token_ids: tokens of the nodes.
    parents: indices of the nodes above them, `ROOT` after the last known token.
    origins: indices of the drafter's tokens that they are, -1 where the grammar
      forces them.
    matchers: n + 1, after the last known token and after each node.
  """

  token_ids: list[int]
  parents: list[int]
  origins: list[int]
  matchers: list['llguidance.LLMatcher']


def draft(
  matcher: 'llguidance.LLMatcher',
  token_ids: Sequence[int],
  parents: Sequence[int],
  room: int,
  *,
  vocabulary: 'llguidance.LLTokenizer | None' = None,
) -> Draft:
  """Merges the draft of a drafter with what the grammar forces.

  Forced tokens follow right after the node that they follow, as they are as
  probable; where some do, no other token of the drafter stays. So a chain stays
  a chain.

  Args:
    matcher: matcher after the last known token.
    token_ids: tokens of the drafter, parents first, the most probable first.
    parents: indices of the tokens above them, `ROOT` for the first ones.
    room: most nodes.
    vocabulary: tokens, of which the room that is left goes to those that the
      grammar leaves a choice of, such as the values of an enum; None for a
      draft without branches.
  """
  found = Draft(token_ids=[], parents=[], origins=[], matchers=[matcher])
  _force(found, ROOT, room)
  nodes = {ROOT: ROOT}  # of the drafter's tokens that stay
  for i, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
    if parent not in nodes:
      continue
    above = nodes[parent]
    node = _forced_child(found, above)
    if node is not None:
      if found.token_ids[node] == token_id:
        nodes[i] = node
    elif len(found.token_ids) < room and _add(found, above, token_id, i):
      nodes[i] = len(found.token_ids) - 1
      _force(found, nodes[i], room)
  leaf = ROOT
  while vocabulary is not None and leaf < len(found.token_ids) < room:
    if leaf not in found.parents:
      _branch(found, leaf, room, vocabulary)
    leaf += 1
  return found


def _forced_child(found: Draft, above: int) -> int | None:
  """Returns the node that the grammar forces after another, if it does."""
  pairs = enumerate(zip(found.parents, found.origins, strict=True))
  return next((i for i, pair in pairs if pair == (above, -1)), None)


def _add(found: Draft, above: int, token_id: int, origin: int) -> bool:
  """Adds a node if the grammar allows it; returns whether it does."""
  matcher = found.matchers[above + 1].deep_copy()
  if not matcher.consume_token(token_id):
    return False
  found.token_ids.append(token_id)
  found.parents.append(above)
  found.origins.append(origin)
  found.matchers.append(matcher)
  return True


def _force(found: Draft, above: int, room: int) -> None:
  """Adds what the grammar forces after a node."""
  for token_id in forced(found.matchers[above + 1]):
    if len(found.token_ids) == room or not _add(found, above, token_id, -1):
      return
    above = len(found.token_ids) - 1


def _branch(
  found: Draft, above: int, room: int, vocabulary: 'llguidance.LLTokenizer'
) -> None:
  """Adds the tokens that the grammar allows after a leaf, if they are few.

  Of several that begin alike, such as the beginnings of a word, the longest.
  """
  matcher = found.matchers[above + 1]
  bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8)
  allowed = np.flatnonzero(np.unpackbits(bits, bitorder='little'))
  if len(allowed) > _MOST_ALLOWED or matcher.is_accepting():
    return
  texts = {i: vocabulary.decode_bytes([i]) for i in allowed.tolist()}
  longest = [
    token_id
    for token_id, text in texts.items()
    if not any(x != text and x.startswith(text) for x in texts.values())
  ]
  if len(longest) > _MOST_BRANCHES:
    return
  for token_id in longest:
    if len(found.token_ids) < room and _add(found, above, token_id, -1):
      _force(found, len(found.token_ids) - 1, room)


def fill_masks(
  masks: np.ndarray, matchers: Sequence['llguidance.LLMatcher']
) -> None:
  """Writes what may come after each of some matchers.

  Args:
    masks: i32[any, W] as `verify.restrict` takes them; the first are written.
    matchers: matchers, each of them once.
  """
  from llguidance import numpy as masks_lib

  copies = [(matcher.deep_copy(), i) for i, matcher in enumerate(matchers)]
  masks_lib.fill_next_token_bitmask_par(_executor(), copies, masks)


@functools.cache
def _executor() -> 'llguidance.LLExecutor':
  return _library().LLExecutor()
