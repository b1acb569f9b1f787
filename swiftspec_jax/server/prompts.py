"""Prompts of requests as token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent import futures

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib

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

  async def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Returns the token ids of prompts; messages alone get the chat template.

    Raises:
      UserError: a prompt is malformed, or so long that it cannot fit.
    """
    for prompt in prompts:
      self._check_length(prompt)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
      self._executor, lambda: list(map(self._encode, prompts))
    )

  def _encode(self, prompt: Prompt) -> tuple[int, ...]:
    token_ids = tokenizer_lib.encode_prompt(
      self._tokenizer, prompt, use_chat_template=False
    )
    return tuple(token_ids)

  def _check_length(self, prompt: Prompt) -> None:
    if isinstance(prompt, str):
      length = len(prompt)
    else:
      length = sum(
        len(part['content']) for part in prompt if isinstance(part, Mapping)
      )
    if length > self._max_characters:
      raise errors.UserError(
        f'the prompt has {length} characters; this server takes at most '
        f'{self._max_context} tokens, prompt and output together'
      )
