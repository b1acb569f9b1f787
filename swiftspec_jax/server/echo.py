"""Prompts that answers begin with."""

import dataclasses
from collections.abc import Sequence

from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.tokenizer import token_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo:
  """A prompt as an answer shows it.

  Attributes:
    text: the prompt; of token ids, the text that they stand for.
    token_ids: n tokens.
    offsets: n numbers of characters of the text before each of them.
  """

  text: str
  token_ids: Sequence[int]
  offsets: Sequence[int]


def echo_of(
  tokenizer: tokenizer_lib.Tokenizer,
  prompt: str | Sequence[int],
  token_ids: Sequence[int],
  *,
  skip_special_tokens: bool = True,
) -> Echo:
  """Returns what an answer shows of a prompt.

  Args:
    tokenizer: tokenizer of the model.
    prompt: the prompt, as a client has sent it.
    token_ids: tokens of the prompt.
    skip_special_tokens: whether the text of token ids leaves special ones out.
  """
  if isinstance(prompt, str):
    text, offsets = prompt, _offsets_in(tokenizer, prompt, token_ids)
  else:
    stream = tokenizer_lib.TextStream(
      tokenizer, skip_special_tokens=skip_special_tokens
    )
    stream.push(token_ids)
    stream.finish()
    text, offsets = stream.text, stream.offsets
  return Echo(text=text, token_ids=token_ids, offsets=offsets)


def _offsets_in(
  tokenizer: tokenizer_lib.Tokenizer, text: str, token_ids: Sequence[int]
) -> list[int]:
  """Finds the tokens in the text; what is not in it, such as BOS, is empty."""
  names, encoded = token_names.of(tokenizer), text.encode()
  offsets, start, num_begun = [], 0, 0
  for token_id in token_ids:
    byte = encoded[start : start + 1]
    # One inside of a character counts as the character.
    offsets.append(num_begun - len(byte) + _num_begun(byte))
    own = names[token_id].encoded or b''
    # The first word can have a space that is not in the text.
    found = (x for x in (own, own.removeprefix(b' ')) if x)
    own = next((x for x in found if encoded.startswith(x, start)), b'')
    start += len(own)
    num_begun += _num_begun(own)
  return offsets


def _num_begun(part: bytes) -> int:
  """Returns how many characters begin in a part of a text in UTF-8."""
  return sum(byte & 0xC0 != 0x80 for byte in part)
