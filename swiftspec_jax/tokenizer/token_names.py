"""What single tokens are called where people and programs read them.

A token keeps its spaces. Part of a character is named by its bytes, as
OpenAI's API does, and no two tokens have the same name.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import pre_tokenizers

from swiftspec_jax.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile('<0x([0-9A-F]{2})>')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenName:
  """A token as answers show it.

  Attributes:
    text: name that no other token of the vocabulary has.
    encoded: bytes that the token stands for in a text, without what decoding
      changes at the start of one; None for an id without a token.
  """

  text: str
  encoded: bytes | None


class TokenNames:
  """Names of a vocabulary, by token id; any id has one."""

  def __init__(self, tokenizer: Tokenizer):
    """Reads the whole vocabulary: tenths of a second for 100,000 tokens."""
    added = tokenizer.added_tokens_decoder
    spell = _speller(tokenizer)
    taken: set[str] = set()
    self._names: dict[int, TokenName] = {}
    for piece, token_id in sorted(tokenizer.get_vocab().items(), key=_rank):
      is_added = token_id in added
      encoded = piece.encode() if is_added else spell(piece, token_id)
      text = next(
        (x for x in _candidates(encoded) if x not in taken), _by_id(token_id)
      )
      taken.add(text)
      self._names[token_id] = TokenName(text=text, encoded=encoded)

  def __getitem__(self, token_id: int) -> TokenName:
    found = self._names.get(token_id)
    return found or TokenName(text=_by_id(token_id), encoded=None)


@functools.lru_cache(maxsize=4)
def of(tokenizer: Tokenizer) -> TokenNames:
  """Returns the names of a vocabulary, which are made once."""
  return TokenNames(tokenizer)


def _rank(item: tuple[str, int]) -> tuple[bool, int]:
  piece, token_id = item
  # A byte is named like a piece of one character, unless there is that piece.
  return _BYTE_TOKEN.fullmatch(piece) is not None, token_id


def _candidates(encoded: bytes) -> list[str]:
  by_bytes = 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in encoded)
  try:
    text = encoded.decode()
  except UnicodeDecodeError:
    return [by_bytes]
  return [text, by_bytes] if text else []


def _by_id(token_id: int) -> str:
  return f'token_id:{token_id}'


def _speller(tokenizer: Tokenizer) -> Callable[[str, int], bytes]:
  """Returns a function of a piece and its id that returns its bytes."""
  decoder = tokenizer.backend_tokenizer.decoder
  # A decoder tells its parts only this way.
  whole = json.loads(decoder.__getstate__()) if decoder else {'type': 'Fuse'}
  steps = [_step(x) for x in whole.get('decoders', [whole])]

  def spell(piece: str, token_id: int) -> bytes:
    for step in steps:
      found = step(piece) if step else tokenizer.decode([token_id]).encode()
      if isinstance(found, bytes):
        return found
      piece = found
    return piece.encode()

  return spell


def _step(step: Mapping[str, Any]) -> Callable[[str], str | bytes] | None:
  """Returns what a part of a decoder makes of a piece; None: not known.

  Bytes are final.
  """
  match step:
    case {'type': 'ByteLevel'}:
      return _read_bytes
    case {'type': 'ByteFallback'}:
      return _read_byte
    case {'type': 'Replace', 'pattern': {'String': old}, 'content': new}:
      return lambda piece: piece.replace(old, new)
    case {'type': 'Metaspace', 'replacement': old}:
      return lambda piece: piece.replace(old, ' ')
    case {'type': 'Fuse' | 'Strip'}:  # these change whole texts
      return str
  return None


def _read_byte(piece: str) -> str | bytes:
  found = _BYTE_TOKEN.fullmatch(piece)
  return bytes.fromhex(found[1]) if found else piece


def _read_bytes(piece: str) -> bytes:
  try:
    return bytes(map(byte_spellings().__getitem__, piece))
  except KeyError:  # what is spelled otherwise stands for itself
    return piece.encode()


@functools.cache
def byte_spellings() -> Mapping[str, int]:
  """Returns the bytes by the characters that spell them in a vocabulary.

  Printable bytes spell themselves, the others have higher characters in their
  order.
  """
  alphabet = sorted(map(ord, pre_tokenizers.ByteLevel.alphabet()))
  others = (byte for byte in range(256) if byte not in alphabet)
  return {chr(code): code if code < 256 else next(others) for code in alphabet}
