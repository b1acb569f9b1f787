"""What tokens are called, and where they lie in a text."""

import types

import hypothesis
import pytest
import tokenizers
import transformers
from hypothesis import strategies as st
from tokenizer_test import small_metadata

from swiftspec_jax import testing
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import gguf_tokenizer
from swiftspec_jax.engine.handles import Update
from swiftspec_jax.server import echo, schema
from swiftspec_jax.server.chat_answers import ChatFormat
from swiftspec_jax.tokenizer import token_names

SMALL = gguf_tokenizer.from_metadata(small_metadata({}))
BYTES = testing.byte_tokenizer()


def names_of(tokenizer, text):
  names = token_names.of(tokenizer)
  ids = tokenizer.encode(text, add_special_tokens=False)
  return [names[token_id] for token_id in ids]


@pytest.mark.parametrize(
  ('tokenizer', 'text', 'expected'),
  [
    # Its decoder takes one space away, so its encoder adds one.
    (SMALL, 'ab ab\n', [' ab', ' ab', '\n']),
    (SMALL, 'a\u00e9', [' a', r'bytes:\xc3', r'bytes:\xa9']),
    (BYTES, ' a\u00e9', [' ', 'a', r'bytes:\xc3', r'bytes:\xa9']),
    (BYTES, '<eos>a', ['<eos>', 'a']),
  ],
)
def test_names(tokenizer, text, expected):
  names = names_of(tokenizer, text)
  assert [name.text for name in names] == expected
  joined = b''.join(name.encoded for name in names).decode()
  assert joined == (' ' if tokenizer is SMALL else '') + text


@pytest.mark.parametrize('tokenizer', [SMALL, BYTES])
def test_no_two_tokens_have_the_same_name(tokenizer):
  names = token_names.of(tokenizer)
  texts = {names[i].text for i in range(len(tokenizer) + 3)}
  assert len(texts) == len(tokenizer) + 3


def test_a_byte_gives_way_to_a_piece_of_its_character():
  names = token_names.of(SMALL)
  byte, piece = SMALL.convert_tokens_to_ids(['<0x61>', 'a'])
  assert names[byte].text == r'bytes:\x61'
  assert names[piece].text == 'a'
  assert names[byte].encoded == names[piece].encoded == b'a'
  beyond = names[10**6]
  assert (beyond.text, beyond.encoded) == ('token_id:1000000', None)


def test_pieces_of_other_kinds_of_vocabularies():
  words = {'[UNK]': 0, 'sea': 1, '##s': 2}
  backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words))
  backend.decoder = tokenizers.decoders.WordPiece()
  other = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
  names = token_names.of(other)
  assert [names[i].text for i in range(3)] == ['[UNK]', 'sea', '##s']
  backend.decoder = tokenizers.decoders.Metaspace()
  backend.model = tokenizers.models.BPE({'\u2581sea': 0, 'sea': 1}, [])
  other = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
  names = token_names.of(other)
  assert [names[i].text for i in range(2)] == [' sea', 'sea']


@hypothesis.given(
  text=st.text(st.sampled_from('ab \n\u00e9\u6f22\U0001f600'), min_size=1)
)
@hypothesis.settings(max_examples=50)
@pytest.mark.parametrize('tokenizer', [SMALL, BYTES])
def test_offsets_of_a_prompt(tokenizer, text):
  hypothesis.assume(not text.startswith(' '))  # SentencePiece would add none
  ids = tokenizer_lib.encode_prompt(tokenizer, text, use_chat_template=False)
  found = echo.echo_of(tokenizer, text, ids)
  assert found.text == text
  # A token lies where the text of those before it ends.
  names, sizes = token_names.of(tokenizer), []
  has_prefix = tokenizer is SMALL
  encoded = b''
  for token_id in ids:
    shown = encoded.removeprefix(b' ') if has_prefix else encoded
    sizes.append(len(shown.decode(errors='ignore')))
    if names[token_id].text != '<s>':
      encoded += names[token_id].encoded
  assert list(found.offsets) == sizes
  of_ids = echo.echo_of(tokenizer, ids, ids)
  assert of_ids.text == text
  assert list(of_ids.offsets) == sizes


def test_special_tokens_of_a_prompt_lie_in_it_if_they_were_written():
  text = '<bos>a<eos>b'
  ids = BYTES.encode(text)
  assert echo.echo_of(BYTES, text, ids).offsets == [0, 5, 6, 11]
  # Those that the text lacks have no width.
  ids = [256, *BYTES.encode('ab')]
  assert echo.echo_of(BYTES, 'ab', ids).offsets == [0, 0, 1]
  assert echo.echo_of(BYTES, ids, ids).text == 'ab'
  shown = echo.echo_of(BYTES, ids, ids, skip_special_tokens=False)
  assert (shown.text, list(shown.offsets)) == ('<bos>ab', [0, 5, 6])


def test_a_text_after_a_prompt_keeps_its_first_space():
  prompt, ids = SMALL.encode('ab'), SMALL.encode('ab a')[1:]
  stream = tokenizer_lib.TextStream(SMALL, follows=prompt)
  assert stream.push(ids) == ' ab a'
  assert stream.offsets == [0, 3]
  # After BOS alone it is the first text.
  assert tokenizer_lib.TextStream(SMALL, follows=prompt[:1]).push(ids) == 'ab a'


def test_offsets_count_what_a_stop_string_withholds():
  stream = tokenizer_lib.TextStream(BYTES, ['ab!'])
  assert stream.push(BYTES.encode('cab')) == 'c'
  stream.push(BYTES.encode('d\u00e9.'))
  assert stream.offsets == [0, 1, 2, 3, 4, 4, 5]
  assert stream.text == 'cabd\u00e9.'


def test_a_part_of_a_character_in_a_chat():
  (token_id, other) = BYTES.encode('\u00e9')
  update = Update(
    token_ids=(token_id,),
    logprobs=(-0.5,),
    top_logprobs=(((token_id, -0.5), (other, -1.0)),),
  )
  model = types.SimpleNamespace(tokenizer=BYTES)
  service = types.SimpleNamespace(name='m', model=model)
  messages = [{'role': 'user', 'content': 'a'}]
  body = schema.ChatRequest.model_validate({'messages': messages})
  form = ChatFormat(service, body, [])
  (found,) = form.news(0, update)
  (entry,) = found['choices'][0]['logprobs']['content']
  top = entry.pop('top_logprobs')
  expected = {'token': r'bytes:\xc3', 'logprob': -0.5, 'bytes': [0xC3]}
  assert entry == top[0] == expected
  assert top[1] == {'token': r'bytes:\xa9', 'logprob': -1.0, 'bytes': [0xA9]}
