"""Tokenizers from .gguf files, prompts, and text from growing token ids."""

import functools
import json
import pathlib
import random

import gguf
import hypothesis
import numpy as np
import pytest
import tokenizer_strings
import tokenizers
import transformers
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import builtin, gguf_tokenizer

SMOLLM = 'smollm2-135m-instruct'
GEMMA = pytest.param('gemma-3-270m', marks=pytest.mark.gemma)
BYTE_TOKENS = [f'<0x{byte:02X}>' for byte in range(256)]
PRE_TYPES = ['default', 'gpt-2', 'smollm', 'llama-bpe', 'qwen2']
TYPE = gguf.TokenType


def read_metadata(path):
  fields = gguf.GGUFReader(path).fields
  return {key: field.contents() for key, field in fields.items()}


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
  return gguf_tokenizer.from_metadata(read_metadata(builtin.fetch(name)))


@pytest.fixture(scope='module')
def smollm():
  return of_file(SMOLLM)


@pytest.fixture(scope='module')
def small():
  return gguf_tokenizer.from_metadata(small_metadata({}))


# ---- from a .gguf file


@pytest.mark.parametrize('name', [SMOLLM, GEMMA])
def test_equals_what_transformers_made(name):
  path = pathlib.Path(__file__).parent / f'golden/tokenizer_{name}.json'
  golden = json.loads(path.read_text())
  tokenizer = of_file(name)

  texts = tokenizer_strings.strings()
  assert len(texts) == len(golden['digests'])
  assert [
    text
    for text, digest in zip(texts, golden['digests'], strict=True)
    if tokenizer_strings.digest(tokenizer, text) != digest
  ] == []


def assert_same(tokenizer, peer):
  rng = random.Random(1)
  for text in tokenizer_strings.strings():
    for special in (True, False):
      ids = tokenizer.encode(text, add_special_tokens=special)
      assert ids == peer.encode(text, add_special_tokens=special), repr(text)
    random_ids = [rng.randrange(len(peer)) for _ in range(10)]
    for sequence in (ids, random_ids):
      for skip in (True, False):
        decoded = tokenizer.decode(sequence, skip_special_tokens=skip)
        assert decoded == peer.decode(sequence, skip_special_tokens=skip)


@pytest.mark.peers
@pytest.mark.parametrize('name', [SMOLLM, GEMMA])
def test_equals_transformers(name):
  path = builtin.fetch(name)
  peer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  assert_same(gguf_tokenizer.from_metadata(read_metadata(path)), peer)


def trained_metadata(pre):
  """A byte-level vocabulary of 900 tokens, one of them with a space."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
    vocab_size=900,
    special_tokens=['<|endoftext|>', '<|begin|>', '<think>', '<two words>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(tokenizer_strings.strings(), trainer)
  model = json.loads(backend.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  types = [TYPE.CONTROL] * 2 + [TYPE.USER_DEFINED] * 2
  return {
    'general.architecture': 'qwen2' if pre == 'qwen2' else 'llama',
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': pre,
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.merges': [' '.join(pair) for pair in model['merges']],
    'tokenizer.ggml.token_type': types + [TYPE.NORMAL] * (len(tokens) - 4),
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 0,
    'tokenizer.ggml.add_bos_token': pre == 'llama-bpe',
    'tokenizer.chat_template': '{{ messages[0].content }}',
  }


def write_gguf(path, metadata):
  writer = gguf.GGUFWriter(path, metadata['general.architecture'])
  writer.add_block_count(1)
  for key, value in metadata.items():
    if isinstance(value, list):
      writer.add_array(key, value)
    elif isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif key != 'general.architecture':
      writer.add_string(key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()


@pytest.mark.peers
@pytest.mark.parametrize(
  ('make', 'argument'),
  [
    *((trained_metadata, pre) for pre in PRE_TYPES),
    (small_metadata, {}),
    (small_metadata, {'tokenizer.ggml.add_bos_token': False}),
    (small_metadata, {'tokenizer.ggml.add_eos_token': True}),
  ],
)
def test_equals_transformers_on_small_vocabularies(tmp_path, make, argument):
  metadata = make(argument)
  path = tmp_path / 'model.gguf'
  write_gguf(path, metadata)
  peer = transformers.AutoTokenizer.from_pretrained(
    tmp_path, gguf_file=path.name
  )
  tokenizer = gguf_tokenizer.from_metadata(read_metadata(path))

  assert_same(tokenizer, peer)
  assert tokenizer.chat_template == peer.chat_template
  for name in ('bos_token_id', 'eos_token_id', 'unk_token_id', 'pad_token_id'):
    assert getattr(tokenizer, name) == getattr(peer, name)


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


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'tokenizer.ggml.model': 't5'}, "'t5'; supported: gpt2, llama"),
    ({'tokenizer.ggml.pre': 'tekken'}, "'tekken'; supported: default, gpt-2"),
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
  bos, word, joined = small.convert_tokens_to_ids(['<s>', 'ab', '▁ab'])
  assert tokenizer_lib.encode_prompt(small, 'ab') == [bos, joined]
  assert tokenizer_lib.encode_prompt(small, '<s>ab') == [bos, word]
  small_chat = gguf_tokenizer.from_metadata(
    small_metadata(
      {'tokenizer.chat_template': '{{bos_token}}{{messages[0].content}}'}
    )
  )
  assert tokenizer_lib.encode_prompt(small_chat, 'ab') == [bos, word]


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


def test_a_template_without_which_a_text_was_to_be_a_turn(small):
  with pytest.raises(errors.UserError, match='no chat template'):
    tokenizer_lib.encode_prompt(small, 'ab', use_chat_template=True)


def test_a_template_that_refuses():
  template = "{{ raise_exception('roles must alternate') }}"
  tokenizer = gguf_tokenizer.from_metadata(
    small_metadata({'tokenizer.chat_template': template})
  )
  with pytest.raises(errors.UserError, match='roles must alternate'):
    tokenizer_lib.encode_prompt(tokenizer, 'ab')


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
@hypothesis.settings(deadline=None, max_examples=300)
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
@hypothesis.settings(deadline=None, max_examples=300)
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


def test_stream_ends_with_what_looked_like_a_stop(smollm):
  stream = tokenizer_lib.TextStream(smollm, ['\n\nQ:'])
  assert stream.push(smollm.encode('a\n\nQ')) == 'a'
  assert stream.finish() == '\n\nQ'
  assert stream.text == 'a\n\nQ'


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


def test_stream_keeps_spaces_between_words(small):
  ids = small.encode('ab  ab a')
  stream = tokenizer_lib.TextStream(small)
  assert [stream.push([token_id]) for token_id in ids[:2]] == ['', 'ab']
  assert stream.push(ids[2:]) == '  ab a'


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
