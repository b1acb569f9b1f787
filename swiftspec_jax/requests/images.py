"""Images of prompts, and the tokens that stand for them.

A prompt has `Vision.num_tokens` placeholders for each image, one after the
other. The engine puts the embeddings of the image in their place.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config.architecture import Vision

MAX_PIXELS = 2**24  # of an image before it is made smaller
_FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF')
_DIGEST_WORDS = 4  # of int32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Image:
  """An image as a model takes it.

  Attributes:
    pixels: u8[P, P, 3] red, green and blue, where P is `Vision.image_size`.
  """

  pixels: np.ndarray

  @functools.cached_property
  def digest(self) -> np.ndarray:
    """i32[4] that no other image has."""
    size = 4 * _DIGEST_WORDS
    found = hashlib.blake2b(self.pixels.tobytes(), digest_size=size).digest()
    return np.frombuffer(found, np.int32)


def read(data: bytes, vision: Vision) -> Image:
  """Returns an image of the size that a model takes.

  Args:
    data: content of a PNG, JPEG, WebP or GIF file; of several frames the first.
    vision: tower of the model.

  Raises:
    UserError: it is no such file, it has more than `MAX_PIXELS`, or Pillow is
      not installed.
  """
  image = _decoded(data)
  size, (width, height) = vision.image_size, image.size
  if vision.crops:
    shape = tuple(size * side // min(width, height) for side in (width, height))
    if shape[0] * shape[1] > MAX_PIXELS:
      raise errors.UserError(
        f'the image of {width} x {height} pixels is too long; cut it'
      )
    left, top = ((side - size) // 2 for side in shape)
    image = image.resize(shape, vision.resample)
    image = image.crop((left, top, left + size, top + size))
  else:
    image = image.resize((size, size), vision.resample)
  return Image(pixels=np.asarray(image))


def _decoded(data: bytes) -> Any:
  """Returns the image of Pillow, upright and of three colours."""
  try:
    import PIL.Image
    import PIL.ImageOps
  except ImportError as error:
    raise errors.UserError(
      'images need Pillow; run: pip install -e ".[images]"'
    ) from error
  try:
    with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as file:
      width, height = file.size
      if width * height <= MAX_PIXELS:
        return PIL.ImageOps.exif_transpose(file).convert('RGB')
  except PIL.Image.DecompressionBombError as error:
    raise errors.UserError(f'the image is too large: {error}') from error
  except (OSError, SyntaxError, ValueError) as error:
    raise errors.UserError(
      f'the image cannot be read ({error}); it must be a PNG, JPEG, WebP or GIF'
    ) from error
  raise errors.UserError(
    f'the image has {width} x {height} pixels; at most {MAX_PIXELS} are read, '
    'make it smaller'
  )


def expand(token_ids: Sequence[int], vision: Vision) -> tuple[int, ...]:
  """Returns a prompt with room for the embeddings of its images.

  Args:
    token_ids: tokens with one placeholder for each image, as chat templates
      write them.
    vision: tower of the model.
  """
  place = vision.image_token_id
  counts = np.where(np.equal(token_ids, place), vision.num_tokens, 1)
  return tuple(np.repeat(token_ids, counts).tolist())


def check_places(
  token_ids: Sequence[int], images: Sequence[Image], vision: Vision
) -> None:
  """Raises UserError if the placeholders of a prompt are not its images'.

  Args:
    token_ids: tokens of the prompt.
    images: images of the prompt.
    vision: tower of the model.
  """
  is_place = np.equal(token_ids, vision.image_token_id)
  expected = len(images) * vision.num_tokens
  if is_place.sum() != expected:
    raise errors.UserError(
      f'the prompt has {is_place.sum()} placeholders (token '
      f'{vision.image_token_id}) for {len(images)} images, which take '
      f'{expected}; write each image once, and no placeholder in a text'
    )
  if is_place[-1]:
    raise errors.UserError('the prompt ends with an image; put a text after it')
  size = vision.image_size
  for image in images:
    if image.pixels.shape != (size, size, 3) or image.pixels.dtype != np.uint8:
      raise errors.UserError(
        f'an image is {image.pixels.dtype}{list(image.pixels.shape)}, the '
        f'model takes uint8[{size}, {size}, 3]; make it with images.read'
      )


def distinct(
  token_ids: Sequence[int], images: Sequence[Image], vision: Vision
) -> np.ndarray:
  """Returns i32[n, 5]: tokens, and digests of the images they stand for.

  Args:
    token_ids: tokens of a prompt that `check_places` has accepted.
    images: images of the prompt.
    vision: tower of the model.
  """
  found = np.zeros((len(token_ids), 1 + _DIGEST_WORDS), np.int32)
  found[:, 0] = token_ids
  if images:
    digests = np.stack([image.digest for image in images])
    is_place = found[:, 0] == vision.image_token_id
    found[is_place, 1:] = np.repeat(digests, vision.num_tokens, axis=0)
  return found
