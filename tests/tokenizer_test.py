"""Tokenizers from .gguf files, prompts, and text from growing token ids."""

import functools
import json
import pathlib
import unicodedata

import gguf
import hypothesis
import numpy as np
import pytest
import tokenizer_strings
import tokenizers
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, trainers

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import builtin, gguf_header, gguf_tokenizer
from swiftspec_jax.checkpoint import pre_tokenizers as byte_level

SMOLLM = 'smollm2-135m-instruct'
GEMMA = pytest.param('gemma-3-270m', marks=pytest.mark.gemma)
BYTE_TOKENS = [f'<0x{byte:02X}>' for byte in range(256)]
TYPE, VALUE = gguf.TokenType, gguf.GGUFValueType


def small_metadata(changes):
  """A SentencePiece vocabulary in the manner of Llama 2."""
  words = [
    '▁', 'a', 'b', 'c', 'e', 'o', 'x', '.', '▁a', '▁b', 'ab', '▁ab', 'bc',
    'abc', '▁abc', 'co', 'oo', '▁▁',
  ]  # fmt: skip
  tokens = ['<unk>', '<s>', '</s>', *BYTE_TOKENS, *words]
  scores = [0.0] * 259 + [-1.0 - index // 3 for index in range(len(words))]
  types = [TYPE.UNKNOWN, TYPE.CONTROL, TYPE.CONTROL] + [TYPE.BYTE] * 256
  metadata = {
    'general.architecture': 'llama',
    'tokenizer.ggml.model': 'llama',
    'tokenizer.ggml.pre': 'default',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.scores': scores,
    'tokenizer.ggml.token_type': types + [TYPE.NORMAL] * len(words),
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.unknown_token_id': 0,
  }
  return metadata | changes


@functools.cache
def of_file(name):
  metadata, _ = gguf_header.read(builtin.fetch(name))
  return gguf_tokenizer.from_metadata(metadata)


@pytest.fixture(scope='module')
def smollm():
  return of_file(SMOLLM)


@pytest.fixture(scope='module')
def small():
  return gguf_tokenizer.from_metadata(small_metadata({}))


# ---- from a .gguf file


def has_other_ids(name, text):
  """Whether llama.cpp departs from the model's own tokenizer.json.

  Those of Qwen compose characters, and Gemma's finds its tokens of spaces in
  the sign for a space, too. llama.cpp has no classes of capitals or marks
  beyond ASCII, nor of letters that fold to those of English endings.
  """
  if name in ('qwen2', 'deepseek-r1-qwen'):
    return not unicodedata.is_normalized('NFC', text) or '\u017f' in text
  if name in ('tekken', 'gpt-4o'):
    kinds = ('Lu', 'Ll', 'Lt', 'Mn', 'Mc', 'Me')
    letters = (char for char in text if not char.isascii())
    return any(unicodedata.category(char) in kinds for char in letters)
  return name == 'gemma-3-270m' and '\u2581' in text


@pytest.mark.parametrize('name', [SMOLLM, GEMMA])
def test_ids_are_those_of_llama_cpp(name):
  path = pathlib.Path(__file__).parent / f'golden/tokenizer_{name}.json'
  digests = json.loads(path.read_text())['digests']
  tokenizer = of_file(name)
  vocabulary = frozenset(tokenizer.get_vocab())
  spell = normalizers.ByteLevel().normalize_str
  for text, digest in zip(tokenizer_strings.strings(), digests, strict=True):
    if has_other_ids(name, text):
      continue
    ids = tokenizer.encode(text)
    assert tokenizer_strings.digest(ids) == digest, repr(text)
    # SmolLM lacks tokens of some bytes; they are lost.
    if name != SMOLLM or vocabulary.issuperset(spell(text)):
      assert tokenizer.decode(ids[tokenizer.add_bos_token :]) == text


def assert_same_as_llama_cpp(name, tokenizer, path):
  llama_cpp_server = pytest.importorskip('llama_cpp_server')
  peer = llama_cpp_server.Tokenizer(path)
  texts = tokenizer_strings.strings(2500)
  texts = [text for text in texts if not has_other_ids(name, text)]
  assert len(texts) >= 1000
  for text in texts[:1000]:
    for special in (True, False):
      ids = tokenizer.encode(text, add_special_tokens=special)
      expected = peer.encode(text, add_special_tokens=special)
      assert ids == expected, repr(text)


@pytest.mark.peers
@pytest.mark.parametrize('name', [SMOLLM, GEMMA])
def test_llama_cpp_gives_the_same(name):
  assert_same_as_llama_cpp(name, of_file(name), builtin.fetch(name))


def trained_metadata(pre):
  """A byte-level vocabulary of 900 tokens, three of which no merge makes."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
    vocab_size=898,
    special_tokens=['<|endoftext|>', '<|begin|>', '<think>', '<two words>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(tokenizer_strings.strings(), trainer)
  model = json.loads(backend.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  tokens += ['_case', 'ĠCamelCase', '<|im_end|>']
  types = [TYPE.CONTROL] * 2 + [TYPE.USER_DEFINED] * 2
  return {
    'general.architecture': 'llama',
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': pre,
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.merges': [' '.join(pair) for pair in model['merges']],
    'tokenizer.ggml.token_type': types + [TYPE.NORMAL] * (len(tokens) - 4),
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 0,
  }


def write_gguf(path, metadata):
  """Writes a tokenizer, and the weights without which llama.cpp has none."""
  writer = gguf.GGUFWriter(path, metadata['general.architecture'])
  writer.add_block_count(1)
  writer.add_context_length(64)
  writer.add_embedding_length(32)
  writer.add_feed_forward_length(32)
  writer.add_head_count(1)
  writer.add_layer_norm_rms_eps(1e-5)
  for key, value in metadata.items():
    if key != 'general.architecture':
      is_int = type(value) is int
      kind = VALUE.UINT32 if is_int else VALUE.get_type(value)
      writer.add_key_value(key, value, kind)
  num_tokens = len(metadata['tokenizer.ggml.tokens'])
  writer.add_tensor('token_embd.weight', np.zeros((num_tokens, 32), np.float32))
  for name in ('output_norm', 'blk.0.attn_norm', 'blk.0.ffn_norm'):
    writer.add_tensor(f'{name}.weight', np.zeros(32, np.float32))
  for name in ('attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_gate',
               'ffn_up', 'ffn_down'):  # fmt: skip
    writer.add_tensor(f'blk.0.{name}.weight', np.zeros((32, 32), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.peers
@pytest.mark.parametrize(
  ('make', 'argument'),
  [
    *((trained_metadata, pre) for pre in byte_level.BY_NAME),
    (small_metadata, {}),
    (small_metadata, {'tokenizer.ggml.add_space_prefix': False}),
    (small_metadata, {'tokenizer.ggml.add_bos_token': False}),
    (small_metadata, {'tokenizer.ggml.add_eos_token': True}),
  ],
)
def test_llama_cpp_gives_the_same_for_small_files(tmp_path, make, argument):
  metadata = make(argument)
  write_gguf(tmp_path / 'model.gguf', metadata)

  tokenizer = gguf_tokenizer.from_metadata(metadata)
  name = argument if isinstance(argument, str) else None
  assert_same_as_llama_cpp(name, tokenizer, tmp_path / 'model.gguf')


# As the models' own tokenizers cut TEXT; '¦' is between pieces.
TEXT = "I'Ll 1234 ÉCOLEsÉt नमस्ते\n\n 7.\t/\n/中文, don't"
PIECES = [
  (['default'],
   "I¦'¦Ll¦ ¦123¦4¦ ÉCOLEsÉt¦ नमस¦्¦त¦े¦\n\n¦ ¦7¦.¦\t¦/¦\n¦/¦中文¦,¦ don¦'¦t"),
  (['gpt-2'],
   "I¦'¦Ll¦ 1234¦ ÉCOLEsÉt¦ नमस¦्¦त¦े¦\n\n¦ 7¦.¦\t¦/¦\n¦/¦中文¦,¦ don¦'t"),
  (['smollm'],
   "I¦'¦Ll¦ ¦1¦2¦3¦4¦ ÉCOLEsÉt¦ नमस¦्¦त¦े¦\n\n ¦7¦.¦\t¦/¦\n¦/¦中文¦,¦ don¦'t"),
  (['llama-bpe', 'llama-v3', 'llama3', 'smaug-bpe'],
   "I¦'Ll¦ ¦123¦4¦ ÉCOLEsÉt¦ नमस¦्त¦े\n\n¦ ¦7¦.¦\t¦/\n¦/中文¦,¦ don¦'t"),
  (['qwen2', 'deepseek-r1-qwen'],
   "I¦'Ll¦ ¦1¦2¦3¦4¦ ÉCOLEsÉt¦ नमस¦्त¦े\n\n¦ ¦7¦.¦\t¦/\n¦/中文¦,¦ don¦'t"),
  (['deepseek-coder'],
   "I¦'¦Ll¦ ¦1¦2¦3¦4¦ ÉCOLEsÉt¦ ¦नमस¦्¦त¦े¦\n¦\n¦ ¦7¦.¦\t/¦\n¦/¦中文¦,¦ don¦'¦t"),
  (['tekken'],
   "I¦'Ll¦ ¦1¦2¦3¦4¦ ÉCOLEs¦Ét¦ नमस्ते¦\n\n¦ ¦7¦.¦\t¦/\n/¦中文¦,¦ don¦'t"),
  (['gpt-4o'],
   "I'Ll¦ ¦123¦4¦ ÉCOLEs¦Ét¦ नमस्ते¦\n\n¦ ¦7¦.¦\t¦/\n/¦中文¦,¦ don't"),
]  # fmt: skip


@pytest.mark.parametrize(('names', 'expected'), PIECES)
def test_how_a_text_is_cut(names, expected):
  for name in names:
    cut = byte_level.BY_NAME[name].pre_tokenizer().pre_tokenize_str(TEXT)
    pieces = [TEXT[start:end] for _, (start, end) in cut]
    assert '¦'.join(pieces) == expected, name


def byte_level_tokenizer(changes):
  """Its merges lead past the whole word: 'bc' comes before 'ab'."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = [
    *letters, 'bc', 'ab', 'cd', 'abcd', 'Ã©', '<|im_end|>', '<s>', '</s>',
    'a b',
  ]  # fmt: skip
  types = [TYPE.NORMAL] * (len(tokens) - 3)
  types += [TYPE.CONTROL, TYPE.UNKNOWN, TYPE.USER_DEFINED]
  return gguf_tokenizer.from_metadata(
    {
      'general.architecture': 'llama',
      'tokenizer.ggml.model': 'gpt2',
      'tokenizer.ggml.tokens': tokens,
      'tokenizer.ggml.merges': ['b c', 'a b', 'c d', 'ab cd', 'Ã ©'],
      'tokenizer.ggml.token_type': types,
      'tokenizer.ggml.bos_token_id': len(tokens) - 3,
      'tokenizer.ggml.eos_token_id': len(tokens) - 2,
    }
    | {f'tokenizer.ggml.{key}': value for key, value in changes.items()}
  )


@pytest.mark.parametrize(
  ('changes', 'text', 'expected'),
  [
    ({'pre': 'llama-bpe'}, 'abcd', ['<s>', 'abcd']),
    ({'pre': 'llama-bpe', 'add_bos_token': False}, 'abcd', ['abcd']),
    ({'pre': 'tekken'}, 'abcd', ['<s>', 'abcd']),
    ({'pre': 'smaug-bpe'}, 'abcd', ['a', 'bc', 'd']),
    ({'pre': 'gpt-4o', 'add_bos_token': True}, 'abcd', ['<s>', 'a', 'bc', 'd']),
    ({}, 'abcd', ['a', 'bc', 'd']),
    # Characters are composed where the model wants it.
    ({'pre': 'qwen2'}, 'e\u0301', ['Ã©']),
    ({'pre': 'qwen2'}, '\xe9', ['Ã©']),
    ({'pre': 'llama-bpe'}, 'e\u0301', ['<s>', 'e', 'Ì', 'ģ']),
  ],
)
def test_whole_pieces_composition_and_bos(changes, text, expected):
  tokenizer = byte_level_tokenizer(changes)
  assert tokenizer.tokenize(text, add_special_tokens=True) == expected


def test_added_tokens_are_found_in_any_text():
  # Also those with a space, which byte-level tokenizers spell differently.
  tokenizer = byte_level_tokenizer({'pre': 'smollm'})
  # So are end tokens that a file calls normal.
  tokens = tokenizer.tokenize('a b<s>a</s><|im_end|>')
  assert tokens == ['a b', '<s>', 'a', '</s>', '<|im_end|>']
  ids = tokenizer.convert_tokens_to_ids(tokens)
  assert tokenizer.decode(ids, skip_special_tokens=True) == 'a ba'


def test_several_spaces_that_gemma_has_tokens_for():
  words = ['  ', '   ', '    ', '▁', 'a', '▁a']
  types = small_metadata({})['tokenizer.ggml.token_type'][:259]
  types += [TYPE.USER_DEFINED] * 3 + [TYPE.NORMAL] * 3
  tokenizer = gguf_tokenizer.from_metadata(
    small_metadata(
      {
        'general.architecture': 'gemma3',
        'tokenizer.ggml.tokens': ['<unk>', '<s>', '</s>', *BYTE_TOKENS, *words],
        'tokenizer.ggml.scores': [-1000.0] * 262 + [-2.0, -3.0, -1.0],
        'tokenizer.ggml.token_type': types,
        'tokenizer.ggml.add_space_prefix': False,
      }
    )
  )
  # As many as there is a token for, then the rest.
  assert tokenizer.tokenize(' ' * 7 + 'a') == ['▁' * 4, '▁' * 3, 'a']
  assert tokenizer.tokenize(' a') == ['▁a']
  assert tokenizer.tokenize('▁▁ a') == ['▁▁', '▁a']


def test_sentencepiece_joins_the_best_pair_first(small):
  # '▁b' beats 'bc', and '▁ab' beats '▁' with 'abc'.
  tokens = small.convert_ids_to_tokens(small.encode('x abc bcé!'))
  assert tokens == (
    ['<s>', '▁', 'x', '▁abc', '▁b', 'c', '<0xC3>', '<0xA9>', '<0x21>']
  )


def test_a_space_in_front_is_added_unless_the_file_forbids_it():
  metadata = small_metadata({'tokenizer.ggml.add_space_prefix': False})
  tokenizer = gguf_tokenizer.from_metadata(metadata)
  tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode('a a'))
  assert tokens == ['<s>', 'a', '▁a']
  assert tokenizer.decode(tokenizer.encode(' a')) == '<s> a'


def test_a_space_in_front_is_one_more_and_follows_special_tokens(small):
  tokens = small.tokenize(' a</s>a')
  assert tokens == ['▁', '▁a', '</s>', '▁a']


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'tokenizer.ggml.model': 't5'}, "'t5'; supported: gpt2, llama"),
    ({'tokenizer.ggml.pre': 'kimi-k2'}, "'kimi-k2'; supported: default, gpt"),
    ({}, 'the file has no tokenizer.ggml.merges'),
  ],
)
def test_unusable_metadata(changes, message):
  metadata = small_metadata({'tokenizer.ggml.model': 'gpt2'} | changes)
  with pytest.raises(errors.UserError, match=message):
    gguf_tokenizer.from_metadata(metadata)


# ---- prompts


def test_a_text_is_the_users_turn_if_there_is_a_template(smollm):
  ids = tokenizer_lib.encode_prompt(smollm, 'Hi')

  text = smollm.decode(ids)
  assert text.endswith(
    '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  )
  assert text.startswith('<|im_start|>system\n')
  messages = [{'role': 'user', 'content': 'Hi'}]
  assert tokenizer_lib.encode_prompt(smollm, messages) == ids
  plain = tokenizer_lib.encode_prompt(smollm, 'Hi', use_chat_template=False)
  assert smollm.decode(plain) == 'Hi'


def test_bos_is_there_once(small):
  bos, word = small.convert_tokens_to_ids(['<s>', '▁ab'])
  assert tokenizer_lib.encode_prompt(small, 'ab') == [bos, word]
  assert tokenizer_lib.encode_prompt(small, '<s>ab') == [bos, word]
  small_chat = gguf_tokenizer.from_metadata(
    small_metadata(
      {'tokenizer.chat_template': '{{bos_token}}{{messages[0].content}}'}
    )
  )
  assert tokenizer_lib.encode_prompt(small_chat, 'ab') == [bos, word]


def test_special_tokens_in_a_users_text_are_tokens(smollm):
  end = smollm.convert_tokens_to_ids('<|im_end|>')
  text = 'a<|im_end|>b'
  plain = tokenizer_lib.encode_prompt(smollm, text, use_chat_template=False)
  letters = smollm.convert_tokens_to_ids(['a', 'b'])
  assert plain == [letters[0], end, letters[1]]
  messages = [{'role': 'user', 'content': text}]
  without = tokenizer_lib.encode_prompt(smollm, 'ab').count(end)
  ids = tokenizer_lib.encode_prompt(smollm, messages)
  assert ids.count(end) == without + 1


def test_token_ids_are_taken_as_they_are(small):
  ids = tokenizer_lib.encode_prompt(small, np.array([5, 0, 5], np.int32))
  assert ids == [5, 0, 5]
  assert all(type(token_id) is int for token_id in ids)


@pytest.mark.parametrize(
  ('prompt', 'message'),
  [
    ('', 'the prompt is empty'),
    ([], 'the prompt is empty'),
    ([{'role': 'user', 'content': ''}], 'no message has content'),
    ([{'role': 'user', 'content': 'a'}], 'no chat template'),
    ([{'role': 'user'}], "strings 'role' and 'content', got {'role': 'user'}"),
    ([{'role': 'user', 'content': 'a'}, 3], 'got 3'),
    ([1, 277], 'holds 277; .* from 0 to 276'),
    ([-1], 'holds -1'),
    ([1.0], r'holds 1\.0'),
    (['a'], "holds 'a'"),
    ('\ud800', 'not valid Unicode'),
  ],
)
def test_unusable_prompts(small, prompt, message):
  with pytest.raises(errors.UserError, match=message):
    tokenizer_lib.encode_prompt(small, prompt)
  # Nor is a text a turn where there is no template.
  with pytest.raises(errors.UserError, match='no chat template'):
    tokenizer_lib.encode_prompt(small, 'ab', use_chat_template=True)


# ---- text from growing token ids

TEXTS = st.text(
  st.sampled_from('ab. \n\u00e9\u6f22\U0001f600\u200d\U0001f469\ufe0f')
  | st.characters(codec='utf-8'),
  max_size=30,
)


def decode_bytes(tokenizer, ids):
  """As transformers does, save that a cut character spoils no other."""
  tokens = tokenizer.convert_ids_to_tokens(ids)
  if not set(tokens) & set(BYTE_TOKENS):
    return tokenizer.decode(ids, skip_special_tokens=True)
  parts = (
    bytes([BYTE_TOKENS.index(token)])
    if token in BYTE_TOKENS
    else token.replace('▁', ' ').encode()
    for token in tokens
  )
  return b''.join(parts).decode(errors='replace').removeprefix(' ')


def expected_stream(tokenizer, ids, stop):
  """What a stream has to give: text, stop string, tokens taken."""
  for num_tokens in range(len(ids) + 1):
    text = decode_bytes(tokenizer, ids[:num_tokens]).rstrip('\ufffd')
    for end in range(len(text) + 1):
      found = [s for s in stop if text[:end].endswith(s)]
      if found:
        longest = max(found, key=len)
        return text[: end - len(longest)], longest, num_tokens
  return text, None, len(ids)


def check_stream(tokenizer, ids, stop, data):
  stream = tokenizer_lib.TextStream(tokenizer, stop)
  expected, stopped, num_tokens = expected_stream(tokenizer, ids, stop)
  pieces = []
  position = 0
  while position < len(ids):
    size = data.draw(st.integers(1, 4))
    pieces.append(stream.push(ids[position : position + size]))
    position += size
    assert expected.startswith(stream.text)
  pieces.append(stream.finish())
  assert ''.join(pieces) == stream.text == expected
  assert (stream.stopped, stream.num_tokens) == (stopped, num_tokens)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300)
@pytest.mark.parametrize('name', ['smollm', 'small'])
def test_stream_of_a_text(request, name, data):
  tokenizer = request.getfixturevalue(name)
  text = data.draw(TEXTS)
  ids = tokenizer.encode(text, add_special_tokens=False)
  ids = ids[: data.draw(st.integers(0, len(ids)))]
  parts = st.integers(0, len(text)).flatmap(
    lambda i: st.integers(1, 6).map(lambda n: text[i : i + n] or 'b.')
  )
  stop = data.draw(st.lists(parts | st.text('ab.', min_size=1), max_size=3))
  check_stream(tokenizer, ids, stop, data)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300)
def test_stream_of_any_ids(smollm, data):
  # The lower ids are single bytes, many of them no characters.
  any_id = st.integers(0, len(smollm) - 1) | st.integers(0, 280)
  ids = data.draw(st.lists(any_id, max_size=30))
  check_stream(smollm, ids, ['e', ' \n', '\ufffd!'], data)


def test_stream_withholds_unfinished_characters_and_stops(smollm):
  stream = tokenizer_lib.TextStream(smollm, ['\n\nQ:', 'END'])
  ids = smollm.encode('a👩‍👩‍👧 END', add_special_tokens=False)
  shown = [stream.push([token_id]) for token_id in ids]
  assert ''.join(shown) == stream.text == 'a👩‍👩‍👧 '
  assert '' in shown[1:-1]
  assert not any('\ufffd' in piece for piece in shown)
  assert (stream.stopped, stream.num_tokens) == ('END', len(ids))
  assert stream.push(ids) == stream.finish() == ''
  assert stream.num_tokens == len(ids)


@pytest.mark.parametrize('skips', [False, True])
def test_stream_of_special_tokens(smollm, small, skips):
  for tokenizer, ids in (
    (smollm, smollm.encode('<|im_start|>user\né<|im_end|>\n<|im_end|>a')),
    (small, [1, *small.encode('ab  ab'), 2, *small.encode('a'), 2]),
  ):
    stream = tokenizer_lib.TextStream(tokenizer, skip_special_tokens=skips)
    for token_id in ids:
      stream.push([token_id])
    expected = tokenizer.decode(ids, skip_special_tokens=skips)
    assert stream.text == expected


def test_stream_stops_at_special_tokens(smollm):
  ids = smollm.encode('a<|im_end|>b<|im_start|>c\n<|im_end|>\nd')
  for stop, shown, hidden in (
    ('<|im_end|>', 'a', 'a'),
    ('<|im_end|>\n', 'a<|im_end|>b<|im_start|>c\n', 'abc\n'),
    ('c\n<|im_end|>', 'a<|im_end|>b<|im_start|>', 'ab'),
    ('bc', None, 'a'),
  ):
    for skips, text in ((False, shown), (True, hidden)):
      stream = tokenizer_lib.TextStream(
        smollm, [stop], skip_special_tokens=skips
      )
      stream.push(ids)
      if text is None:
        assert stream.stopped is None
      else:
        assert (stream.text, stream.stopped) == (text, stop)


def test_stream_goes_on_after_broken_bytes(small):
  # decode() would turn the 'é' into question marks, too.
  ids = small.convert_tokens_to_ids(['<0xC3>', '<0xA9>', '<0xC3>', 'x', 'x'])
  stream = tokenizer_lib.TextStream(small)
  shown = [stream.push([token_id]) for token_id in ids]
  assert shown == ['', 'é', '', '\ufffdx', 'x']


# ---- two models


def test_same_vocabulary(small):
  metadata = small_metadata({})
  other = gguf_tokenizer.from_metadata(metadata)
  count = tokenizer_lib.num_shared_tokens('big', small, 'little', other)
  assert count == 277
  metadata['tokenizer.ggml.tokens'][270] = 'q'
  other = gguf_tokenizer.from_metadata(metadata)
  with pytest.raises(
    errors.UserError,
    match=r"big \(277 tokens\) and little \(277 .* 270 is '▁ab' and 'q'",
  ):
    tokenizer_lib.num_shared_tokens('big', small, 'little', other)


def test_a_longer_vocabulary(small):
  other = gguf_tokenizer.from_metadata(small_metadata({}))
  other.add_tokens('more')
  for pair in (
    ('big', small, 'little', other),
    ('big', other, 'little', small),
  ):
    assert tokenizer_lib.num_shared_tokens(*pair) == 277
