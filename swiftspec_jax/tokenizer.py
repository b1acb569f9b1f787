"""From a prompt to token ids, and from token ids to text as they come in."""

import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import transformers

from swiftspec_jax import chat_template, errors
from swiftspec_jax.chat_template import Message

Tokenizer: TypeAlias = transformers.PreTrainedTokenizerFast

_BROKEN = '\ufffd'  # what bytes that are no character are decoded to


def encode_prompt(
  tokenizer: Tokenizer,
  prompt: str | Sequence[Message] | Sequence[int],
  *,
  use_chat_template: bool | None = None,
  takes_parts: bool = False,
) -> list[int]:
  """Returns the token ids that a model is to continue.

  Args:
    tokenizer: the model's tokenizer.
    prompt: a text, messages (each with 'role' and 'content'), or token ids,
      which are taken as they are.
    use_chat_template: whether a text is the user's turn of a conversation;
      None is yes if the tokenizer has a chat template. Any other text gets
      the tokenizer's own special tokens, such as BOS.
    takes_parts: whether the content of messages may be a list of parts, as the
      chat templates of models that read images want it.

  Raises:
    UserError: the prompt is empty or malformed, or needs a chat template that
      the tokenizer lacks.
  """
  if len(prompt) == 0:
    raise errors.UserError('the prompt is empty; give at least one token')
  if use_chat_template is None:
    use_chat_template = tokenizer.chat_template is not None
  if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
    return [_check_id(token_id, len(tokenizer)) for token_id in prompt]
  if isinstance(prompt, str) and not use_chat_template:
    # The user may have written BOS.
    bos = tokenizer.bos_token
    has_bos = bos is not None and prompt.startswith(bos)
    return _encode_text(tokenizer, prompt, add_special_tokens=not has_bos)
  if isinstance(prompt, str):
    prompt = [{'role': 'user', 'content': prompt}]
  # The template writes BOS where the model wants it.
  text = _render(tokenizer, prompt, str | list if takes_parts else str)
  return _encode_text(tokenizer, text, add_special_tokens=False)


def control_token_ids(tokenizer: Tokenizer) -> list[int]:
  """Returns the ids of special tokens, such as those of a chat template."""
  added = tokenizer.added_tokens_decoder
  return [token_id for token_id, token in added.items() if token.special]


def _check_id(token_id: Any, vocab_size: int) -> int:
  if not hasattr(token_id, '__index__') or not 0 <= token_id < vocab_size:
    raise errors.UserError(
      f'the prompt holds {token_id!r}; token ids of this model are integers '
      f'from 0 to {vocab_size - 1}'
    )
  return operator.index(token_id)


def _render(
  tokenizer: Tokenizer,
  messages: Sequence[Message],
  kind: type | types.UnionType,
) -> str:
  """Returns the text of a conversation up to the model's turn."""
  for message in messages:
    if not (
      isinstance(message, Mapping)
      and isinstance(message.get('role'), str)
      and isinstance(message.get('content'), kind)
    ):
      raise errors.UserError(
        f"each message needs the strings 'role' and 'content', got {message!r}"
      )
  if not any(message['content'] for message in messages):
    raise errors.UserError('the prompt is empty: no message has content')
  if tokenizer.chat_template is None:
    raise errors.UserError(
      'this model has no chat template; give the prompt as one plain text'
    )
  return chat_template.render(tokenizer, messages)


def _encode_text(
  tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    message = f'the prompt is not valid Unicode: {error}'
    raise errors.UserError(message) from error
  ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
  if not ids:
    raise errors.UserError(f'the prompt {text!r} has no tokens')
  return ids


class TextStream:
  """Text of a growing sequence of token ids, cut at a stop string.

  What was returned is never taken back: a character of which bytes are
  missing and what may be the start of a stop string are withheld. Special
  tokens give no text.

  Attributes:
    text: everything that was returned so far.
    stopped: the stop string that was completed first, else None.
    num_tokens: number of token ids that were read, up to and including the one
      that completed the stop string.
    offsets: number of characters of the text before each of these token ids;
      text that a stop string cuts off counts, too.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    *,
    follows: Sequence[int] = (),
  ):
    """Starts an empty text.

    Args:
      tokenizer: the model's tokenizer.
      stop: strings, none empty, that end the text; they are not part of it.
      follows: token ids of the text before, such as a prompt. After them the
        first word keeps its leading space.
    """
    self.text = ''
    self.offsets: list[int] = []
    self.stopped: str | None = None
    self.num_tokens = 0
    self._stop = tuple(stop)
    self._withheld = ''
    self._backend = tokenizer.backend_tokenizer
    # Token ids that are not all text yet, and how many characters are.
    self._pending: list[int] = []
    self._num_settled = 0
    # Decoded in front of the pending ids once there is text, because the
    # first word of a text can lose its leading space.
    self._context = list(follows[-1:])

  def push(self, token_ids: Sequence[int]) -> str:
    """Takes the next token ids and returns the text that is now certain.

    Token ids behind a stop string are ignored.
    """
    start = len(self.text)
    for token_id in token_ids:
      if self.stopped is not None:
        break
      self.num_tokens += 1
      self.offsets.append(len(self.text) + len(self._withheld))
      self._withheld += self._decode(int(token_id))
      self._release()
    return self.text[start:]

  def finish(self) -> str:
    """Returns what was withheld, without the bytes of a cut-off character."""
    rest, self._withheld = self._withheld, ''
    self.text += rest
    return rest

  def _decode(self, token_id: int) -> str:
    # tokenizers' DecodeStream is not used: it raises, and goes on raising,
    # when byte tokens behind a complete character break off.
    self._pending.append(token_id)
    num_context = len(self._backend.decode(self._context))
    text = self._backend.decode(self._context + self._pending)[num_context:]
    settled = text.rstrip(_BROKEN)
    new = settled[self._num_settled :]
    self._num_settled = len(settled)
    if settled == text and (text or self._context):
      self._pending, self._num_settled = [], 0
      encoding = self._backend.encode('a', add_special_tokens=False)
      self._context = encoding.ids[-1:]
    return new

  def _release(self) -> None:
    """Moves text from `_withheld` to `text` as far as stop strings allow."""
    found = [stop for stop in self._stop if stop in self._withheld]
    if found:
      ends = {stop: self._withheld.index(stop) + len(stop) for stop in found}
      # The first to be complete; of several the longest.
      self.stopped = min(found, key=lambda stop: (ends[stop], -len(stop)))
      self.text += self._withheld[: ends[self.stopped] - len(self.stopped)]
      self._withheld = ''
      return
    lengths = [
      n
      for stop in self._stop
      for n in range(1, len(stop))
      if self._withheld.endswith(stop[:n])
    ]
    num_free = len(self._withheld) - max(lengths, default=0)
    self.text += self._withheld[:num_free]
    self._withheld = self._withheld[num_free:]


def num_shared_tokens(
  target_name: str,
  target_tokenizer: Tokenizer,
  draft_name: str,
  draft_tokenizer: Tokenizer,
) -> int:
  """Returns how many token ids mean the same to both models.

  These are all ids of one of them: the other may know more behind.

  Raises:
    UserError: an id has another token in each.
  """
  target, draft = map(_tokens, (target_tokenizer, draft_tokenizer))
  pairs = enumerate(zip(target, draft, strict=False))
  different = ((i, pair) for i, pair in pairs if pair[0] != pair[1])
  first, tokens = next(different, (None, None))
  if tokens is None:
    return min(len(target), len(draft))
  raise errors.UserError(
    f'{target_name} ({len(target)} tokens) and {draft_name} ({len(draft)} '
    f'tokens) have different vocabularies: token {first} is {tokens[0]!r} and '
    f'{tokens[1]!r}; choose a draft model of the same family'
  )


def _tokens(tokenizer: Tokenizer) -> list[str | None]:
  """Returns all tokens by their ids."""
  by_id = {i: token for token, i in tokenizer.get_vocab().items()}
  return [by_id.get(i) for i in range(max(by_id) + 1)]
