"""Prompts of requests as token ids."""

import asyncio
import base64
import functools
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config.architecture import Vision
from swiftspec_jax.requests import images
from swiftspec_jax.requests.images import Image
from swiftspec_jax.tokenizer import token_names

# A text, messages or token ids.
Prompt = str | Sequence[tokenizer_lib.Message] | Sequence[int]


class PromptEncoder:
  """Encodes prompts in a thread of its own, so the event loop goes on."""

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    max_context: int,
    vision: Vision | None = None,
    max_images: int = 0,
  ):
    """Looks at the vocabulary.

    Args:
      tokenizer: tokenizer of the model.
      max_context: most tokens of a request.
      vision: tower of the model; None if it reads no images.
      max_images: most images of a request.
    """
    self._tokenizer = tokenizer
    self._max_context = max_context
    self._vision = vision
    self._max_images = max_images
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
    encode = functools.partial(self._encode, **options)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
      self._executor, lambda: list(map(encode, prompts))
    )

  async def read(self, urls: Sequence[str]) -> tuple[Image, ...]:
    """Returns the images of data URLs.

    Raises:
      UserError: the model reads no images, or not as many; a URL is of another
        kind, or its image cannot be read.
    """
    if urls and self._vision is None:
      raise errors.UserError('this model reads no images; send text alone')
    if len(urls) > self._max_images:
      raise errors.UserError(
        f'these are {len(urls)} images; this server takes at most '
        f'{self._max_images} (--max_images) in a request'
      )
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
      self._executor,
      lambda: [images.read(_data_of(url), self._vision) for url in urls],
    )
    return tuple(found)

  def _encode(self, prompt: Prompt, **options: Any) -> tuple[int, ...]:
    token_ids = tokenizer_lib.encode_prompt(
      self._tokenizer,
      prompt,
      use_chat_template=False,
      takes_parts=self._vision is not None,
      **options,
    )
    is_chat = isinstance(prompt[0], Mapping)
    if is_chat and self._vision is not None:
      return images.expand(token_ids, self._vision)
    return tuple(token_ids)

  def _check_length(self, prompt: Prompt) -> None:
    if isinstance(prompt, str):
      length = len(prompt)
    else:
      length = sum(
        len(_text_of(part)) for part in prompt if isinstance(part, Mapping)
      )
    if length > self._max_characters:
      raise errors.UserError(
        f'the prompt has {length} characters; this server takes at most '
        f'{self._max_context} tokens, prompt and output together'
      )


def _text_of(message: tokenizer_lib.Message) -> str:
  content = message['content']
  if isinstance(content, str):
    return content
  return ''.join(part.get('text', '') for part in content)


def _data_of(url: str) -> bytes:
  """Returns what a data URL holds."""
  head, _, data = url.partition(',')
  if not (head.startswith('data:image/') and head.endswith(';base64')):
    raise errors.UserError(
      f'image_url {url[:40]!r} is not supported: this server fetches nothing; '
      'send the image itself, as data:image/png;base64,...'
    )
  try:
    return base64.b64decode(data, validate=True)
  except ValueError as error:
    raise errors.UserError(f'image_url is not valid base64: {error}') from error
