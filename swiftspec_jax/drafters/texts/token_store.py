"""Many texts of tokens in memory-mapped files, to look continuations up in.

The texts stand one after another, each with a mark at its end, and a suffix
array sorts the places by the tokens from there on: the places where some tokens
stand are a range of it, found by two binary searches (SSSD, arXiv 2411.05894).

Legend: n tokens of all texts, marks included.
"""

import bisect
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.runtime import atomic_file
from swiftspec_jax.tokenizer import Tokenizer

FORMAT = 'swiftspec_jax texts 1'
# Tokens by which places are sorted; no longer match can be looked for.
MAX_MATCH = 32
_END = 0  # mark after a text; token i is stored as i + 1
_FILE = 'store.json'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
  """Texts, and their places in order.

  Attributes:
    tokens: u16[n] or u32[n], token ids plus 1; 0 after each text.
    suffixes: u32[n] or i64[n] places, by the first 32 tokens from there on;
      equal ones by place.
    vocabulary: size and digest of the tokens of the model that uses it.
  """

  tokens: np.ndarray
  suffixes: np.ndarray
  vocabulary: dict[str, Any]

  @classmethod
  def of_texts(
    cls, texts: Iterable[Sequence[int]], tokenizer: Tokenizer
  ) -> 'TokenStore':
    """Returns a store in memory.

    Args:
      texts: token ids of each; empty ones are left out.
      tokenizer: tokenizer that they are of.

    Raises:
      UserError: there is no text, or a token is outside the vocabulary.
    """
    vocabulary = _vocabulary(tokenizer)
    size = vocabulary['size']
    parts = []
    for text in texts:
      ids = np.asarray(text, np.int64)
      if not len(ids):
        continue
      if ids.min() < 0 or ids.max() >= size:
        raise errors.UserError(
          f'a text has token {ids.min() if ids.min() < 0 else ids.max()}; ids '
          f'are 0 to {size - 1}'
        )
      parts += [ids + 1, [_END]]
    if not parts:
      raise errors.UserError('there is no text to store; give at least one')
    tokens = np.concatenate(parts)
    dtype = np.uint16 if size < 2**16 else np.uint32
    return cls(
      tokens=tokens.astype(dtype),
      suffixes=suffix_array(tokens),
      vocabulary=vocabulary,
    )

  def save(self, directory: pathlib.Path) -> None:
    """Writes the files; that with the description comes last.

    Raises:
      UserError: they cannot be written.
    """
    try:
      directory.mkdir(parents=True, exist_ok=True)
      for name in ('tokens', 'suffixes'):
        path = directory / f'{name}.npy'
        with atomic_file.replacing(path) as partial, partial.open('wb') as file:
          np.save(file, getattr(self, name))
      values = {'format': FORMAT, 'vocabulary': self.vocabulary}
      with atomic_file.replacing(directory / _FILE) as partial:
        partial.write_text(json.dumps(values))
    except OSError as error:
      raise errors.UserError(
        f'cannot write a store to {directory}: {error}'
      ) from error

  @classmethod
  def open(cls, directory: pathlib.Path) -> 'TokenStore':
    """Returns a store whose arrays stay in their files.

    Raises:
      UserError: there is none, or a file is cut short.
    """
    try:
      values = json.loads((directory / _FILE).read_text())
      if values['format'] != FORMAT:
        raise ValueError(f'its format is {values["format"]!r}')
      tokens, suffixes = (
        np.load(directory / f'{name}.npy', mmap_mode='r')
        for name in ('tokens', 'suffixes')
      )
      if not len(tokens) or len(tokens) != len(suffixes):
        raise ValueError(f'{len(tokens)} tokens have {len(suffixes)} places')
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise errors.UserError(
        f'{directory} holds no whole store of texts ({error}); write one with '
        'swiftspec_jax.cli.build_store'
      ) from error
    return cls(
      tokens=tokens, suffixes=suffixes, vocabulary=values['vocabulary']
    )

  def check(self, name: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if model `name` has another vocabulary."""
    if self.vocabulary != _vocabulary(tokenizer):
      raise errors.UserError(
        f'the store of texts is of another vocabulary than that of {name}; '
        'write one with swiftspec build_store --target'
      )

  def places(self, match: Sequence[int]) -> np.ndarray:
    """Returns the places where tokens stand, as a part of `suffixes`.

    Args:
      match: token ids, from 1 to `MAX_MATCH`.
    """
    wanted = [token_id + 1 for token_id in match]

    def tokens_at(place):
      return self.tokens[place : place + len(wanted)].tolist()

    start = bisect.bisect_left(self.suffixes, wanted, key=tokens_at)
    end = bisect.bisect_right(self.suffixes, wanted, lo=start, key=tokens_at)
    return self.suffixes[start:end]

  def continuations(
    self, match: Sequence[int], length: int, most: int
  ) -> Iterator[list[int]]:
    """Yields what stands after tokens, in none of the texts beyond its end.

    Args:
      match: token ids, from 1 to `MAX_MATCH`.
      length: most tokens of a continuation; there is at least one.
      most: number of places to look at, evenly spaced.
    """
    places = self.places(match)
    if len(places) > most:
      places = places[np.arange(most) * len(places) // most]
    for place in places.tolist():
      start = place + len(match)
      found = self.tokens[start : start + length].tolist()
      if _END in found:
        found = found[: found.index(_END)]
      if found:
        yield [stored - 1 for stored in found]


def suffix_array(tokens: np.ndarray) -> np.ndarray:
  """Returns places u32[n] or i64[n], sorted by what stands there.

  Ranks by the first tokens, twice as many in each round (Manber and Myers,
  1993), up to `MAX_MATCH`.

  Args:
    tokens: i64[n], at least 0.
  """
  size = len(tokens)
  _, ranks = np.unique(tokens, return_inverse=True)
  order = np.argsort(ranks, kind='stable')
  length = 1
  while length < MAX_MATCH and ranks.max() < size - 1:
    # What lies after the end comes first.
    after = np.zeros(size, np.int64)
    after[: size - length] = ranks[length:] + 1
    keys = ranks.astype(np.int64) * (size + 1) + after
    order = np.argsort(keys, kind='stable')
    is_larger = np.diff(keys[order]) > 0
    ranks = np.empty(size, np.int64)
    ranks[order] = np.concatenate([[0], is_larger.cumsum()])
    length *= 2
  return order.astype(np.uint32 if size < 2**32 else np.int64)


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
  size = len(tokenizer)
  tokens = map(tokenizer.backend_tokenizer.id_to_token, range(size))
  digest = hashlib.sha256('\n'.join(map(repr, tokens)).encode()).hexdigest()
  return {'size': size, 'sha256': digest}


def split(
  token_ids: Sequence[int], eos_token_ids: Sequence[int]
) -> Iterator[list[int]]:
  """Yields the parts of a text, each up to an end-of-sequence token."""
  start = 0
  for place, token_id in enumerate(token_ids):
    if token_id in eos_token_ids:
      yield list(token_ids[start : place + 1])
      start = place + 1
  if start < len(token_ids):
    yield list(token_ids[start:])
