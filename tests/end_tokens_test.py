"""The tokens that end what a model writes, by all sources that name some."""

import dataclasses

import pytest
from decoding_cases import CONFIG

from swiftspec_jax import testing
from swiftspec_jax.checkpoint import end_tokens


@pytest.mark.parametrize(
  ('tokens', 'keys', 'expected'),
  [
    (['a', '<|endoftext|>', '<|im_start|>', '<|im_end|>'], {'eos': 3}, (3, 1)),
    (['<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'], {'eos': 2}, (2, 0, 1)),
    (['<eos>', '<start_of_turn>', '<end_of_turn>'], {'eos': 0}, (0, 2)),
    (['</s>', 'x', '\u2581<EOT>', '<fim_pad>'], {'eot': 1}, (1, 2, 3)),
    (['a', '<|file_sep|>', 'x', 'y'], {'fim_pad': 2, 'fim_rep': 3}, (2, 3, 1)),
    (['a', 'end'], {}, ()),
  ],
)
def test_names_in_gguf_files(tokens, keys, expected):
  metadata = {f'tokenizer.ggml.{k}_token_id': i for k, i in keys.items()}
  metadata['tokenizer.ggml.tokens'] = tokens
  assert end_tokens.of_gguf(metadata) == expected


LOOP = '{% for m in messages %}<bos>{{ m.role }}: '
REFUSES = "{{ raise_exception('no') }}"


@pytest.mark.parametrize(
  ('template', 'expected'),
  [
    (LOOP + '{{ m.content }}<pad>{% endfor %}', '<pad>'),
    (LOOP + '{{ m.content | trim }} \n<pad>\n{% endfor %}', '<pad>'),
    # Of gpt-oss: the end of a message that others follow is none of an answer.
    (
      LOOP + '{{ m.content }}{% if loop.last %}<pad>{% else %}<reserved_1>'
      '{% endif %}{% endfor %}',
      '<pad>',
    ),
    (LOOP + '{{ m.content }}###{% endfor %}', None),
    (LOOP + '{{ m.role }}{% endfor %}<pad>', None),
    (REFUSES, None),
    ('{{ messages[0].content + none }}', None),
    (None, None),
  ],
)
def test_the_end_of_a_turn_in_chat_templates(template, expected):
  tokenizer = testing.byte_tokenizer()
  tokenizer.chat_template = template
  tokenizer.eos_token = None
  found = end_tokens.complete(CONFIG, tokenizer).eos_token_ids
  assert tokenizer.convert_ids_to_tokens(found) == [expected] * bool(expected)


def test_sources_add_up():
  config = dataclasses.replace(CONFIG, eos_token_ids=(7, 260))
  tokenizer = testing.byte_tokenizer()  # its <eos> also ends turns
  more = end_tokens.complete(config, tokenizer, (8, 260, 261))
  # Token 8 is text.
  assert more.eos_token_ids == (7, 260, 261, 257)
  assert end_tokens.complete(more, tokenizer) == more
