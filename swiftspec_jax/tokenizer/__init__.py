"""From a prompt to token ids, and from token ids to text as they come in."""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax.tokenizer import chat_template
from swiftspec_jax.tokenizer.chat_template import Message, Tokenizer

_BROKEN = '\ufffd'  # what bytes that are no character are decoded to


def encode_prompt(
  tokenizer: Tokenizer,
  prompt: str | Sequence[Message] | Sequence[int],
  *,
  use_chat_template: bool | None = None,
  template_options: chat_template.Options | None = None,
  add_special_tokens: bool = True,
) -> list[int]:
  """Returns the token ids that a model is to continue.

  Args:
    tokenizer: the model's tokenizer.
    prompt: a text, messages (each with 'role' and 'content'), or token ids,
      which are taken as they are.
    use_chat_template: whether a text is the user's turn of a conversation;
      None is yes if the tokenizer has a chat template. Any other text gets
      the tokenizer's own special tokens, such as BOS.
    template_options: further input of the chat template.
    add_special_tokens: whether a text without a template gets special tokens.

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
    adds = add_special_tokens and not has_bos
    return _encode_text(tokenizer, prompt, add_special_tokens=adds)
  if isinstance(prompt, str):
    prompt = [{'role': 'user', 'content': prompt}]
  # The template writes BOS where the model wants it.
  _check_messages(tokenizer, prompt)
  options = template_options or chat_template.Options()
  text = chat_template.render(tokenizer, prompt, options)
  return _encode_text(tokenizer, text, add_special_tokens=False)


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
  """Returns the special tokens, such as those of a chat template, by id."""
  added = tokenizer.added_tokens_decoder
  return {i: token.content for i, token in added.items() if token.special}


def _check_id(token_id: Any, vocab_size: int) -> int:
  if not hasattr(token_id, '__index__') or not 0 <= token_id < vocab_size:
    raise errors.UserError(
      f'the prompt holds {token_id!r}; token ids of this model are integers '
      f'from 0 to {vocab_size - 1}'
    )
  return operator.index(token_id)


def _check_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
  """Raises UserError for messages that no template can render."""
  for message in messages:
    if not (
      isinstance(message, Mapping)
      and isinstance(message.get('role'), str)
      and isinstance(message.get('content'), str)
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


def _encode_text(
  tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
  invalid = 'the prompt is not valid Unicode: '
  with errors.explained(invalid, UnicodeEncodeError):
    text.encode()
  ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
  if not ids:
    raise errors.UserError(f'the prompt {text!r} has no tokens')
  return ids


class TextStream:
  """Text of a growing sequence of token ids, cut at a stop string.

  What was returned is never taken back: a character of which bytes are
  missing and what may be the start of a stop string are withheld. Special
  tokens are found by the stop strings that name them, even where they give no
  text.

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
    min_tokens: int = 0,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
  ):
    """Starts an empty text.

    Args:
      tokenizer: the model's tokenizer.
      stop: strings, none empty, that end the text.
      follows: token ids of the text before, such as a prompt. After them the
        first word keeps its leading space.
      min_tokens: number of first token ids that complete no stop string.
      include_stop: whether the stop string is part of the text.
      skip_special_tokens: whether special tokens give no text.
    """
    self.text = ''
    self.offsets: list[int] = []
    self.stopped: str | None = None
    self.num_tokens = 0
    self._stop = tuple(stop)
    self._min_tokens = min_tokens
    self._includes_stop = include_stop
    self._withheld = ''
    self._is_shown: list[bool] = []  # of each withheld character
    self._backend = tokenizer.backend_tokenizer
    self._skips = skip_special_tokens
    special = special_tokens(tokenizer) if stop and self._skips else {}
    # By id, those that are part of a stop string.
    self._hidden = {
      i: name for i, name in special.items() if any(name in x for x in stop)
    }
    # Token ids that are not all text yet, and how many characters are.
    self._pending: list[int] = []
    self._num_settled = 0
    # Decoded in front of the pending ids once there is text, because the
    # first word of a text can lose its leading space.
    self._context = list(follows[-1:])

  def push(self, token_ids: Sequence[int]) -> str:
    """Takes the next token ids and returns the text that is now certain.

    Token ids after a stop string are ignored.
    """
    start = len(self.text)
    for token_id in token_ids:
      if self.stopped is not None:
        break
      self.num_tokens += 1
      self.offsets.append(len(self.text) + sum(self._is_shown))
      hidden = self._hidden.get(token_id)
      new = self._decode(int(token_id)) if hidden is None else hidden
      self._take(new, is_shown=hidden is None)
    return self.text[start:]

  def finish(self) -> str:
    """Returns what was withheld, without the bytes of a cut-off character."""
    start = len(self.text)
    self._release(len(self._withheld))
    return self.text[start:]

  def _decode(self, token_id: int) -> str:
    # tokenizers' DecodeStream is not used: it raises, and goes on raising,
    # when byte tokens after a complete character break off.
    self._pending.append(token_id)
    decode = functools.partial(
      self._backend.decode, skip_special_tokens=self._skips
    )
    text = decode(self._context + self._pending)[len(decode(self._context)) :]
    settled = text.rstrip(_BROKEN)
    new = settled[self._num_settled :]
    self._num_settled = len(settled)
    if settled == text and (text or self._context):
      self._pending, self._num_settled = [], 0
      encoding = self._backend.encode('a', add_special_tokens=False)
      self._context = encoding.ids[-1:]
    return new

  def _take(self, new: str, *, is_shown: bool) -> None:
    """Adds text, and releases what stop strings allow."""
    num_old = len(self._withheld)
    self._withheld += new
    self._is_shown += [is_shown] * len(new)
    ends = {}
    if self.num_tokens > self._min_tokens:
      for stop in self._stop:
        # What ends in old text was too early.
        start = self._withheld.find(stop, max(num_old + 1 - len(stop), 0))
        if start >= 0:
          ends[stop] = start + len(stop)
    if ends:
      # The first to be complete; of several the longest.
      self.stopped = min(ends, key=lambda stop: (ends[stop], -len(stop)))
      num_cut = 0 if self._includes_stop else len(self.stopped)
      self._release(ends[self.stopped] - num_cut)
      self._withheld, self._is_shown = '', []
      return
    lengths = [
      n
      for stop in self._stop
      for n in range(1, len(stop))
      if self._withheld.endswith(stop[:n])
    ]
    self._release(len(self._withheld) - max(lengths, default=0))

  def _release(self, count: int) -> None:
    """Moves the first withheld characters to `text`."""
    free, self._withheld = self._withheld[:count], self._withheld[count:]
    self.text += ''.join(itertools.compress(free, self._is_shown))
    del self._is_shown[:count]


def num_shared_tokens(
  target_name: str,
  target_tokenizer: Tokenizer,
  draft_name: str,
  draft_tokenizer: Tokenizer,
) -> int:
  """Returns how many token ids mean the same to both models.

  These are all ids of one of them: the other may know more after.

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
