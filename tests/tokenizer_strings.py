"""Texts on which tokenizers tend to differ; the same on every machine."""

import hashlib
import json
import random
from collections.abc import Sequence

# First and last code points of scripts, digits, marks, symbols and controls.
_BLOCKS = [
  (0x00, 0x1F), (0x20, 0x7E), (0x20, 0x7E), (0x7F, 0x9F), (0xA0, 0xFF),
  (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF),
  (0x531, 0x587), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F),
  (0x980, 0x9FF), (0xB80, 0xBFF), (0xE01, 0xE5B), (0xF00, 0xFBC),
  (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x1E00, 0x1EFF),
  (0x1F00, 0x1FFE), (0x2000, 0x206F), (0x2070, 0x209C), (0x20A0, 0x20BF),
  (0x2150, 0x218B), (0x2190, 0x22FF), (0x2460, 0x24FF), (0x2500, 0x257F),
  (0x2580, 0x2583), (0x2600, 0x27BF), (0x3000, 0x303F), (0x3041, 0x30FF),
  (0x3400, 0x34FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF),
  (0xFB00, 0xFB4F), (0xFE00, 0xFE0F), (0xFF01, 0xFF9F), (0xFFF9, 0xFFFF),
  (0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1F64F),
  (0x20000, 0x2A6DF), (0xE0001, 0xE007F), (0x10FF00, 0x10FFFF),
]  # fmt: skip
_SPACES = [
  ' ', '  ', '    ', ' ' * 17, '\t', '\t\t', '\n', '\n\n', '\r\n', '\r',
  '\v', '\f', '\x85', '\xa0', '\u1680', '\u2003', '\u200b', '\u2028',
  '\u3000', '\ufeff', '\u2581',
]  # fmt: skip
_EMOJI = [
  '😀', '👩', '👨', '👧', '❤️', '👍', '🏽', '🇩🇪', '🏳️', '🌈', '1️⃣', '\u200d',
]  # fmt: skip
_SPECIAL = [
  '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<repo_name>', '<bos>',
  '<eos>', '<pad>', '<unk>', '<mask>', '<start_of_turn>', '<end_of_turn>',
  '<unused7>', '[multimodal]', '<s>', '</s>', '<|begin_of_text|>',
  '<|eot_id|>', '<0x0A>', '<0xE2>', '<table>', '</h1>', '<|im_start',
  'im_end|>',
]  # fmt: skip
_WORDS = [
  'the', 'The', 'THE', "don't", "I'LL", "we've", 'naïve', 'e\u0301tude',
  'Straße', 'ǅungla', 'ﬁne', 'İstanbul', '\u017fpell', "'s", '\u2019s',
  'Ωmega', 'привет', 'характер', 'Việt', 'nhiều', 'değil', 'příliš', '東京',
  'สวัสดี', 'नमस्ते', 'مرحبا', 'שלום', '한국어', 'x_1', 'snake_case', 'CamelCase',
  'http://a.b/c?d=e&f#g', 'user@example.com', 'self.__init__(**kwargs)',
  'for (int i = 0; i < n; ++i) {', '} // end', '#include <a.h>', '"""', '->',
  '1. First', '\n\n2. ', '[\n    3,', '!==', '...', '…', '--', '—', '¿', '$',
  '€5', '100%', 'H₂O', 'x²', '½', 'Ⅷ',
]  # fmt: skip
_FIXED = [
  '', ' ', 'a', ' a', 'a ', '\n', '\x00', '\ufffd', '\ufffd\ufffda\ufffd',
  'a' * 3000, ' ' * 1000, '\n' * 500, '7' * 1000, '!' * 300, '漢' * 700,
  'é' * 400, 'e\u0301' * 400, '👩‍👩‍👧‍👦' * 60, 'ab ' * 1500, '\t \n' * 200,
  'def f(x):\n    return x\n\n\nif True:\n\tprint(f(1))\r\n',
]  # fmt: skip


def _characters(rng: random.Random) -> str:
  blocks = [rng.choice(_BLOCKS) for _ in range(rng.randint(1, 3))]
  codes = [rng.randint(*rng.choice(blocks)) for _ in range(rng.randint(1, 30))]
  return ''.join(map(chr, codes))


def _number(rng: random.Random) -> str:
  digits = ''.join(rng.choice('0123456789') for _ in range(rng.randint(1, 12)))
  zero = rng.choice([0x30, 0x30, 0x660, 0x966, 0xFF10, 0x1D7D8])
  digits = ''.join(chr(zero + int(digit)) for digit in digits)
  return rng.choice(['', '-', '$', ' ', 'x']) + rng.choice(['', '.', ',']).join(
    [digits, rng.choice(['', '0', '25', 'e-7', 'km'])]
  )


def _bytes(rng: random.Random) -> str:
  return rng.randbytes(rng.randint(1, 40)).decode(errors='replace')


def _text(rng: random.Random) -> str:
  """Returns words, numbers, emoji, special tokens with spaces between."""
  space = rng.choice(['', ' ', None])
  parts = []
  for _ in range(rng.randint(1, 15)):
    parts.append(
      rng.choice(
        [
          lambda: rng.choice(_WORDS),
          lambda: rng.choice(_WORDS),
          lambda: _number(rng),
          lambda: ''.join(rng.choices(_EMOJI, k=rng.randint(1, 5))),
          lambda: rng.choice(_SPECIAL),
          lambda: _characters(rng),
        ]
      )()
    )
    parts.append(rng.choice(_SPACES) if space is None else space)
  return ''.join(parts)


def _spaces(rng: random.Random) -> str:
  return ''.join(
    rng.choice(_SPACES) * rng.randint(1, 3)
    + rng.choice(['', '', rng.choice(_WORDS), _number(rng)])
    for _ in range(rng.randint(1, 12))
  )


def strings(count: int = 1000, seed: int = 0) -> list[str]:
  """Returns `count` texts of many kinds, none with surrogates."""
  rng = random.Random(seed)
  kinds = [_characters, _number, _bytes, _text, _text, _text, _spaces]
  made = [rng.choice(kinds)(rng) for _ in range(count - len(_FIXED))]
  return _FIXED + made


def digest(ids: Sequence[int]) -> str:
  """Returns eight hexadecimal digits of token ids."""
  return hashlib.blake2b(json.dumps(ids).encode(), digest_size=4).hexdigest()
