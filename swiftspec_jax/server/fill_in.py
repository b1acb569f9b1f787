"""Prompts of models that fill in between two texts."""

from swiftspec_jax import errors
from swiftspec_jax.tokenizer import Tokenizer

# Tokens before the text, before its suffix, and before what comes between.
_TOKENS = (
  ('<|fim_prefix|>', '<|fim_suffix|>', '<|fim_middle|>'),  # Qwen, CodeGemma
  ('<fim_prefix>', '<fim_suffix>', '<fim_middle>'),  # StarCoder, Granite
  (
    '<\uff5cfim\u2581begin\uff5c>',
    '<\uff5cfim\u2581hole\uff5c>',
    '<\uff5cfim\u2581end\uff5c>',
  ),  # DeepSeek
  ('\u2581<PRE>', '\u2581<SUF>', '\u2581<MID>'),  # CodeLlama
)


def prompt_of(
  tokenizer: Tokenizer, prompt: str | list[int], suffix: str
) -> str:
  """Returns the prompt that asks for what is between two texts.

  Raises:
    UserError: the model was not trained to fill in, or the prompt is no text.
  """
  if not isinstance(prompt, str):
    raise errors.UserError('suffix needs a prompt that is a text')
  vocabulary = tokenizer.get_vocab()
  for before, between, after in _TOKENS:
    if {before, between, after} <= vocabulary.keys():
      return f'{before}{prompt}{between}{suffix}{after}'
  raise errors.UserError(
    'suffix is not supported: the tokenizer of this model has no tokens to '
    'fill in between two texts'
  )
