"""Which tokens end what a model writes: every source that names some.

A model that misses one writes on, in another's name or another document, up to
the token limit.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import ModelConfig

# .gguf files name few of the tokens that end a text; those of known names do,
# too: of turns and documents, and of files in texts to fill in.
_KEYS = 'eos', 'eot', 'eom', 'fim_pad', 'fim_rep', 'fim_sep'
NAMES = frozenset(
  {
    '<|im_end|>',
    '<|eot_id|>',
    '<|eom_id|>',
    '<|end|>',
    '<end_of_turn>',
    '<end_of_utterance>',
    '<|endoftext|>',
    '<|end_of_text|>',
    '<|EOT|>',
    '<EOT>',
    '_<EOT>',
    '\u2581<EOT>',
    '<\uff5cend\u2581of\u2581sentence\uff5c>',
    '<|fim_pad|>',
    '<fim_pad>',
    '<fim-pad>',
    '<|fim_repo|>',
    '<fim-repo>',
    '<|repo_name|>',
    '<reponame>',
    '<|file_sep|>',
  }
)

# Words that no template has reason to change.
_QUESTION, _ANSWER = 'How are you today?', 'Very well indeed.'


def of_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the end tokens that a .gguf file names, or that have such names.

  Args:
    metadata: the key-values of the file as plain Python values.
  """
  named = (metadata.get(f'tokenizer.ggml.{key}_token_id') for key in _KEYS)
  tokens = enumerate(metadata.get('tokenizer.ggml.tokens', ()))
  known = (token_id for token_id, token in tokens if token in NAMES)
  return _unique([*(i for i in named if i is not None), *known])


def complete(
  config: ModelConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  others: Iterable[int] = (),
) -> ModelConfig:
  """Adds the end tokens of tokenizer, chat template and other sources.

  Args:
    config: configuration with the tokens that are certain.
    tokenizer: tokenizer of the model.
    others: tokens of sources that are sometimes left over from another
      vocabulary. Those that stand for ordinary text do not count.
  """
  special = tokenizer_lib.special_tokens(tokenizer)
  more = (*others, tokenizer.eos_token_id, _end_of_turn(tokenizer))
  found = [*config.eos_token_ids, *(i for i in more if i in special)]
  return dataclasses.replace(config, eos_token_ids=_unique(found))


def _end_of_turn(tokenizer: tokenizer_lib.Tokenizer) -> int | None:
  """Returns the special token that the chat template writes after an answer."""
  if tokenizer.chat_template is None:
    return None
  conversation = [
    {'role': 'user', 'content': _QUESTION},
    {'role': 'assistant', 'content': _ANSWER},
  ]
  try:
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
  except (jinja2.TemplateError, LookupError, TypeError, ValueError):
    return None  # it takes no such conversation
  _, answer, rest = text.rpartition(_ANSWER)
  special, rest = tokenizer_lib.special_tokens(tokenizer), rest.lstrip()
  following = [i for i, name in special.items() if rest.startswith(name)]
  if not (answer and following):
    return None
  return max(following, key=lambda i: len(special[i]))


def _unique(token_ids: Iterable[int]) -> tuple[int, ...]:
  return tuple(dict.fromkeys(token_ids))
