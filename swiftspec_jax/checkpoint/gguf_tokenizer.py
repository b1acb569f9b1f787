"""Builds a tokenizer from the metadata of a .gguf file.

It gives the ids of the model's own `tokenizer.json`. llama.cpp gives the same
for the same file, with few exceptions (docs/results/tokenizers.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import end_tokens
from swiftspec_jax.checkpoint import pre_tokenizers as byte_level

_GEMMA = ('gemma', 'gemma2', 'gemma3')
_SPACE = '\u2581'  # how SentencePiece spells a space
_NAMED_TOKENS = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}
# Tokens that are left out of texts for people, and all that are found in a text
# before anything else. End tokens are, too, though some files call them normal.
_SPECIAL_TYPES = frozenset({gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN})
_ADDED_TYPES = _SPECIAL_TYPES | {gguf.TokenType.USER_DEFINED}


def from_metadata(
  metadata: Mapping[str, Any],
) -> transformers.PreTrainedTokenizerFast:
  """Builds the tokenizer that a .gguf file describes.

  Args:
    metadata: the key-values of the file as plain Python values.

  Returns:
    The tokenizer, with special tokens and chat template.

  Raises:
    UserError: the kind of tokenizer is unknown, or a key is missing.
  """
  tokenizer = transformers.PreTrainedTokenizerFast(
    # Filled below: the class copies what it gets, which takes 1 s for Gemma.
    tokenizer_object=tokenizers.Tokenizer(models.BPE()),
    chat_template=metadata.get('tokenizer.chat_template'),
    clean_up_tokenization_spaces=False,
  )
  model = metadata.get('tokenizer.ggml.model')
  if model == 'gpt2':
    _fill_byte_level(tokenizer.backend_tokenizer, metadata)
  elif model == 'llama':
    _fill_sentencepiece(tokenizer.backend_tokenizer, metadata)
  else:
    raise errors.UserError(
      f'tokenizer.ggml.model is {model!r}; supported: gpt2, llama'
    )
  _add_special_tokens(tokenizer, metadata)
  return tokenizer


def _get(metadata: Mapping[str, Any], name: str) -> Any:
  key = f'tokenizer.ggml.{name}'
  if key not in metadata:
    raise errors.UserError(
      f'the file has no {key}; convert it again with a current llama.cpp'
    )
  return metadata[key]


def _tokens(metadata: Mapping[str, Any]) -> Sequence[str]:
  tokens = _get(metadata, 'tokens')
  if metadata['general.architecture'] not in _GEMMA:
    return tokens
  # Tokens of several spaces are stored unspelled.
  return [
    _SPACE * len(token) if ' ' in token and not token.strip() else token
    for token in tokens
  ]


def _byte_level_rules(metadata: Mapping[str, Any]) -> byte_level.PreTokenizer:
  name = metadata.get('tokenizer.ggml.pre', 'default')
  errors.check_known('tokenizer.ggml.pre is', name, byte_level.BY_NAME)
  return byte_level.BY_NAME[name]


def _fill_byte_level(
  backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  rules = _byte_level_rules(metadata)
  backend.model = models.BPE(
    vocab={token: index for index, token in enumerate(_tokens(metadata))},
    merges=[tuple(pair.split(' ')) for pair in _get(metadata, 'merges')],
    ignore_merges=rules.prefers_whole_pieces,
  )
  if rules.is_composed:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = rules.pre_tokenizer()
  backend.decoder = decoders.ByteLevel()


def _fill_sentencepiece(
  backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  tokens = _tokens(metadata)
  backend.model = models.BPE(
    vocab={token: index for index, token in enumerate(tokens)},
    merges=_merges(tokens, _scores(metadata)),
    fuse_unk=True,
    byte_fallback=True,
  )
  spaces = normalizers.Replace(' ', _SPACE)
  steps = [
    decoders.Replace(_SPACE, ' '),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if metadata.get('tokenizer.ggml.add_space_prefix', True):
    # Also where a text goes on after a special token.
    spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    steps.append(decoders.Strip(content=' ', left=1))
  backend.normalizer = spaces
  backend.decoder = decoders.Sequence(steps)


def _scores(metadata: Mapping[str, Any]) -> list[float]:
  # Files give tokens that users defined, such as Gemma's of several spaces,
  # the lowest score; SentencePiece joins them first.
  scores, types = _get(metadata, 'scores'), _get(metadata, 'token_type')
  return [
    0.0 if token_type == gguf.TokenType.USER_DEFINED else score
    for score, token_type in zip(scores, types, strict=True)
  ]


def _merges(
  tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
  """Returns every way to join two tokens into a third, best first.

  Args:
    tokens: the vocabulary.
    scores: scores of the tokens, higher is better.
  """
  score = dict(zip(tokens, scores, strict=True))
  merges = [
    (left, right)
    for token in score
    for cut in range(len(token) - 1, 0, -1)
    if (left := token[:cut]) in score and (right := token[cut:]) in score
  ]
  merges.sort(
    key=lambda pair: (score[pair[0] + pair[1]], len(pair[0]), len(pair[1])),
    reverse=True,
  )
  return merges


def _add_special_tokens(
  tokenizer: transformers.PreTrainedTokenizerFast,
  metadata: Mapping[str, Any],
) -> None:
  tokens = _tokens(metadata)
  ids = {
    name: metadata[f'tokenizer.ggml.{key}']
    for name, key in _NAMED_TOKENS.items()
    if f'tokenizer.ggml.{key}' in metadata
  }
  for name, token_id in ids.items():
    if token_id >= len(tokens):
      raise errors.UserError(
        f'the {name} has id {token_id}, the vocabulary has {len(tokens)} '
        'tokens; the file is damaged'
      )
  named = {name: tokens[token_id] for name, token_id in ids.items()}
  tokenizer.add_special_tokens(named)
  types = metadata.get('tokenizer.ggml.token_type', [0] * len(tokens))
  is_special = {
    token: token in end_tokens.NAMES or token_type in _SPECIAL_TYPES
    for token, token_type in zip(tokens, types, strict=True)
    if token in end_tokens.NAMES or token_type in _ADDED_TYPES
  }
  tokenizer.backend_tokenizer.add_tokens(
    [
      tokenizers.AddedToken(token, normalized=False, special=special)
      for token, special in is_special.items()
    ]
  )
  is_sentencepiece = metadata['tokenizer.ggml.model'] == 'llama'
  tokenizer.add_bos_token = metadata.get(
    'tokenizer.ggml.add_bos_token',
    is_sentencepiece or _byte_level_rules(metadata).adds_bos,
  )
  tokenizer.add_eos_token = metadata.get('tokenizer.ggml.add_eos_token', False)
