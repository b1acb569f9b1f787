"""A tokenizer with a token for each byte."""

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from swiftspec_jax import errors
from swiftspec_jax.tokenizer import token_names

_NUM_BYTES = 256
_SPECIAL_TOKENS = (
  '<bos>',
  '<eos>',
  '<pad>',
  '<|system|>',
  '<|user|>',
  '<|assistant|>',
)
BOS, EOS = _NUM_BYTES, _NUM_BYTES + 1
_CHAT_TEMPLATE = (
  '<bos>{% for message in messages %}'
  "<|{{ message['role'] }}|>{{ message['content'] }}<eos>"
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


def byte_tokenizer(
  vocab_size: int = 272,
) -> transformers.PreTrainedTokenizerFast:
  """Returns a tokenizer with a token for each byte, and a chat template.

  Ids 0 to 255 are the bytes, then come special tokens: BOS, EOS, padding,
  three roles, and reserved ones up to `vocab_size`.
  """
  least = _NUM_BYTES + len(_SPECIAL_TOKENS)
  if vocab_size < least:
    raise errors.UserError(
      f'vocab_size must be at least {least}, got {vocab_size}'
    )
  reserved = [f'<reserved_{i}>' for i in range(vocab_size - least)]
  vocabulary = dict(token_names.byte_spellings())
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([*_SPECIAL_TOKENS, *reserved])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token='<bos>',
    eos_token='<eos>',
    pad_token='<pad>',
    chat_template=_CHAT_TEMPLATE,
    clean_up_tokenization_spaces=False,
  )
