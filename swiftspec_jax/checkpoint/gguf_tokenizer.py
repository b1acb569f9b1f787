"""Builds a tokenizer from the metadata of a .gguf file.

The result gives the ids of transformers'
`AutoTokenizer.from_pretrained(directory, gguf_file=name)`, which needs torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from swiftspec_jax import errors

# How text is cut before merging, by `tokenizer.ggml.pre`; None is GPT-2's way.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
_LLAMA3 = _WORDS + r'|\p{N}{1,3}' + _OTHERS
_QWEN2 = _WORDS + r'|\p{N}' + _OTHERS
_SPLITS = {
  'default': None,
  'gpt-2': None,
  'smollm': None,
  'llama-bpe': _LLAMA3,
  'llama-v3': _LLAMA3,
  'llama3': _LLAMA3,
  'qwen2': _QWEN2,
  'deepseek-r1-qwen': _QWEN2,
}

_GEMMA = ('gemma', 'gemma2', 'gemma3')
_SPACE = '\u2581'  # how SentencePiece spells a space
_NAMED_TOKENS = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}


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
  elif model == 'llama' and metadata['general.architecture'] in _GEMMA:
    _fill_gemma(tokenizer.backend_tokenizer, metadata)
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


def _fill_byte_level(
  backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  pre = metadata.get('tokenizer.ggml.pre', 'default')
  if pre not in _SPLITS:
    raise errors.UserError(
      f'tokenizer.ggml.pre is {pre!r}; supported: {", ".join(_SPLITS)}'
    )
  spell = normalizers.ByteLevel().normalize_str
  is_spelled = frozenset(pre_tokenizers.ByteLevel.alphabet()).issuperset
  vocabulary = {
    token if is_spelled(token) else spell(token): index
    for index, token in enumerate(_get(metadata, 'tokens'))
  }
  merges = [tuple(pair.split(' ')) for pair in _get(metadata, 'merges')]
  backend.model = models.BPE(vocab=vocabulary, merges=merges)
  backend.decoder = decoders.ByteLevel()
  if _SPLITS[pre] is None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  else:
    split = tokenizers.Regex(_SPLITS[pre])
    steps = [
      pre_tokenizers.Split(split, behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _fill_gemma(
  backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  # Tokens of several spaces are stored unspelled.
  tokens = [
    _SPACE * len(token) if ' ' in token and not token.strip() else token
    for token in _get(metadata, 'tokens')
  ]
  # The scores of these files are not the order of the merges: the ids are.
  backend.model = models.BPE(
    vocab={token: index for index, token in enumerate(tokens)},
    merges=_merges(tokens, None),
    unk_token='<unk>',
    fuse_unk=True,
    byte_fallback=True,
  )
  backend.normalizer = normalizers.Replace(' ', _SPACE)
  backend.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
  backend.decoder = decoders.Sequence(_sentencepiece_decoders())


def _fill_sentencepiece(
  backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  tokens = _get(metadata, 'tokens')
  backend.model = models.BPE(
    vocab={token: index for index, token in enumerate(tokens)},
    merges=_merges(tokens, _get(metadata, 'scores')),
    fuse_unk=True,
    byte_fallback=True,
  )
  has_prefix = metadata.get('tokenizer.ggml.add_space_prefix', True)
  backend.pre_tokenizer = pre_tokenizers.Metaspace(
    prepend_scheme='first' if has_prefix else 'never', split=False
  )
  steps = _sentencepiece_decoders()
  if has_prefix:
    steps.append(decoders.Strip(content=' ', left=1))
  backend.decoder = decoders.Sequence(steps)


def _sentencepiece_decoders() -> list[decoders.Decoder]:
  spaces = decoders.Replace(_SPACE, ' ')
  return [spaces, decoders.ByteFallback(), decoders.Fuse()]


def _merges(
  tokens: Sequence[str], scores: Sequence[float] | None
) -> list[tuple[str, str]]:
  """Returns every way to join two tokens into a third, best first.

  Args:
    tokens: the vocabulary.
    scores: scores of the tokens, higher is better. None: earlier is better.
  """
  vocabulary = dict.fromkeys(tokens)
  merges = [
    (left, right)
    for token in vocabulary
    for cut in range(len(token) - 1, 0, -1)
    if (left := token[:cut]) in vocabulary
    and (right := token[cut:]) in vocabulary
  ]
  if scores is not None:
    score = dict(zip(tokens, scores, strict=True))
    merges.sort(
      key=lambda pair: (score[pair[0] + pair[1]], len(pair[0]), len(pair[1])),
      reverse=True,
    )
  return merges


def _add_special_tokens(
  tokenizer: transformers.PreTrainedTokenizerFast,
  metadata: Mapping[str, Any],
) -> None:
  tokens = _get(metadata, 'tokens')
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
  # A token that was respelled above is matched like any text.
  backend = tokenizer.backend_tokenizer
  types = metadata.get('tokenizer.ggml.token_type', [0] * len(tokens))
  for kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED):
    added = [
      tokenizers.AddedToken(
        token, normalized=False, special=kind == gguf.TokenType.CONTROL
      )
      for token, token_type in zip(tokens, types, strict=True)
      if token_type == kind and backend.token_to_id(token) is not None
    ]
    backend.add_tokens(added)
  is_sentencepiece = metadata['tokenizer.ggml.model'] == 'llama'
  tokenizer.add_bos_token = metadata.get(
    'tokenizer.ggml.add_bos_token', is_sentencepiece
  )
  tokenizer.add_eos_token = metadata.get('tokenizer.ggml.add_eos_token', False)
