"""How a target's chat template wraps the turns of a conversation."""

import dataclasses

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.tokenizer import chat_template

_MARKS = ('\u2042first\u2042', '\u2042second\u2042', '\u2042third\u2042')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
  """Token ids around the turns of a conversation, as the template has them."""

  opening: tuple[int, ...]  # before the first user turn
  closing: tuple[int, ...]  # between a user turn and its answer
  between: tuple[int, ...]  # between an answer and the next user turn


def chat_format(
  tokenizer: tokenizer_lib.Tokenizer, system: str | None = None
) -> ChatFormat:
  """Finds out how the template wraps turns.

  Args:
    tokenizer: tokenizer of the target.
    system: a system prompt, unless the template refuses it; None is what the
      template does without.

  Raises:
    UserError: there is no chat template, or it changes what it is given.
  """
  if tokenizer.chat_template is None:
    raise errors.UserError(
      'the target has no chat template, so it cannot write conversations; '
      'choose an instruction-tuned target'
    )
  roles = ('user', 'assistant', 'user')
  messages = [
    {'role': role, 'content': mark}
    for role, mark in zip(roles, _MARKS, strict=True)
  ]
  if system is not None:
    messages.insert(0, {'role': 'system', 'content': system})
  try:
    text = chat_template.apply(tokenizer, messages)
  except errors.UserError:
    if system is not None:  # not all templates know that role
      return chat_format(tokenizer)
    raise
  pieces, rest = [], text
  for mark in _MARKS:
    piece, found, rest = rest.partition(mark)
    if not found:
      raise errors.UserError(
        "the target's chat template changes the text of turns; it cannot be "
        'used to write conversations'
      )
    pieces.append(tokenizer.encode(piece, add_special_tokens=False))
  opening, closing, between = pieces
  if not (opening and closing and between):
    raise errors.UserError(
      "the target's chat template puts nothing before or between turns; it "
      'cannot be used to write conversations'
    )
  return ChatFormat(
    opening=tuple(opening), closing=tuple(closing), between=tuple(between)
  )
