"""How byte-level tokenizers cut text before they merge, by name.

The names are those of `tokenizer.ggml.pre` in .gguf files. The rules are those
of the models' own `tokenizer.json`; where a file does not say whether BOS
comes first, llama.cpp's rule decides.
"""

import dataclasses

import tokenizers
from tokenizers import pre_tokenizers


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
  """What a byte-level tokenizer does before it merges.

  Attributes:
    splits: regular expressions. Each divides the pieces that the one before
      has left: its matches and what is between them are the new pieces.
    is_composed: whether text is first brought into Unicode's normal form C.
    prefers_whole_pieces: whether a piece that is a token is not merged. Some
      of the tokens of such vocabularies cannot be reached by merges.
    adds_bos: whether BOS comes first if the file does not say.
  """

  splits: tuple[str, ...]
  is_composed: bool = False
  prefers_whole_pieces: bool = False
  adds_bos: bool = False

  def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
    """Returns the step that cuts a text and spells its bytes."""
    steps = [
      pre_tokenizers.Split(tokenizers.Regex(split), behavior='isolated')
      for split in self.splits
    ]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, spell])


_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|"
  r'\s+(?!\S)|\s+'
)
# Later tokenizers differ in what makes a word, how many digits stay together,
# and what may follow other characters.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r'[^\r\n\p{L}\p{N}]?\p{L}+'
_UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]'
_LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_CASED_WORD, _CAPITALS = (
  rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}'
  for upper, lower in ('*+', '+*')
)
_SPACES = r'\s*[\r\n]+|\s+(?!\S)|\s+'
_OTHERS = r' ?[^\s\p{L}\p{N}]+[\r\n]*'
_OTHERS_AND_SLASHES = r' ?[^\s\p{L}\p{N}]+[\r\n/]*'

_LLAMA3 = '|'.join((_ENDINGS, _WORD, r'\p{N}{1,3}', _OTHERS, _SPACES))
_QWEN2 = '|'.join((_ENDINGS, _WORD, r'\p{N}', _OTHERS, _SPACES))
_TEKKEN = '|'.join(
  (_CASED_WORD, _CAPITALS, r'\p{N}', _OTHERS_AND_SLASHES, _SPACES)
)
_GPT4O = '|'.join(
  (
    f'{_CASED_WORD}{_ENDINGS}?',
    f'{_CAPITALS}{_ENDINGS}?',
    r'\p{N}{1,3}',
    _OTHERS_AND_SLASHES,
    _SPACES,
  )
)
_DEEPSEEK_CODER = (
  r'[\r\n]',
  r'\s?\p{L}+',
  r'\s?\p{P}+',
  '[\u0800-\u9fa5\uac00-\ud7ff]+',
  r'\p{N}',
)
# What llama.cpp takes when a file does not name one.
_UNNAMED = (
  r'[\p{P}\$\+<=>\^~\|]+',
  _GPT2,
  r'\p{N}+',
  '[0-9][0-9][0-9]',
)

_LLAMA3_BPE = PreTokenizer((_LLAMA3,), prefers_whole_pieces=True, adds_bos=True)
BY_NAME = {
  'default': PreTokenizer(_UNNAMED),
  'gpt-2': PreTokenizer((_GPT2,)),
  'smollm': PreTokenizer((r'\p{N}', _GPT2)),
  'llama-bpe': _LLAMA3_BPE,
  'llama-v3': _LLAMA3_BPE,
  'llama3': _LLAMA3_BPE,
  'smaug-bpe': PreTokenizer((_LLAMA3,)),
  'qwen2': PreTokenizer((_QWEN2,), is_composed=True),
  'deepseek-r1-qwen': PreTokenizer((_QWEN2,), is_composed=True),
  'deepseek-coder': PreTokenizer(_DEEPSEEK_CODER),
  'tekken': PreTokenizer((_TEKKEN,), prefers_whole_pieces=True, adds_bos=True),
  'gpt-4o': PreTokenizer((_GPT4O,)),
}
