"""Prompts of requests as token ids."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.tokenizer import token_names

# A text, messages or token ids.
Prompt = str | Sequence[tokenizer_lib.Message] | Sequence[int]


class PromptEncoder:
  """Encodes prompts in a thread of its own, so the event loop goes on."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer, max_context: int):
    """Looks at the vocabulary.

    Args:
      tokenizer: tokenizer of the model.
      max_context: most tokens of a request.
    """
    self._tokenizer = tokenizer
    self._max_context = max_context
    # No token stands for more characters than it is written with.
    self._max_characters = max_context * max(map(len, tokenizer.get_vocab()))
    # One thread: tokenizers need not bear several.
    self._executor = futures.ThreadPoolExecutor(1, 'tokenizer')
    # Answers need them, and making them takes a moment.
    self._executor.submit(token_names.of, tokenizer)

  async def encode(
    self, prompts: Sequence[Prompt], **options: Any
  ) -> list[tuple[int, ...]]:
    """Returns the token ids of prompts; messages alone get the chat template.

    Args:
      prompts: prompts.
      **options: `template_options` and `add_special_tokens` of
        `tokenizer.encode_prompt`.

    Raises:
      UserError: a prompt is malformed, or so long that it cannot fit.
    """
    for prompt in prompts:
      self._check_length(prompt)
    encode = functools.partial(
      tokenizer_lib.encode_prompt,
      self._tokenizer,
      use_chat_template=False,
      **options,
    )
    return await asyncio.get_running_loop().run_in_executor(
      self._executor, lambda: [tuple(encode(prompt)) for prompt in prompts]
    )

  def _check_length(self, prompt: Prompt) -> None:
    if isinstance(prompt, str):
      length = len(prompt)
    else:
      messages = (part for part in prompt if isinstance(part, Mapping))
      length = sum(len(message['content']) for message in messages)
    if length > self._max_characters:
      raise errors.UserError(
        f'the prompt has {length} characters; this server takes at most '
        f'{self._max_context} tokens, prompt and output together'
      )
