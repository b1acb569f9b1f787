"""Embeddings of the images of the requests in the slots, on the devices.

Legend: B slots, J images of a slot, I embeddings of an image, D embed, S tokens
of the longest text, N tokens of a step.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from swiftspec_jax.config.architecture import Vision
from swiftspec_jax.models import vision
from swiftspec_jax.models.params import Params


@struct.dataclass(frozen=True, kw_only=True)
class SlotImages:
  """What stands in the place of the embeddings of some tokens of prompts."""

  embeddings: jax.Array  # [B * J, I, D]
  # i32[B, S] which of the B * J * I a token has; -1 where it has its own.
  index: jax.Array

  def of_tokens(
    self, slots: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns embeddings [N, D], and bool[N] which tokens have one.

    Args:
      slots: i32[N]; B for padding.
      positions: i32[N] in their rows.
    """
    index = self.index.at[slots, positions].get(mode='fill', fill_value=-1)
    flat = self.embeddings.reshape(-1, self.embeddings.shape[-1])
    return flat[jnp.maximum(index, 0)], index >= 0


@functools.partial(jax.jit, static_argnames='config', donate_argnames='images')
def see(
  params: Params,
  images: SlotImages,
  pixels: jax.Array,
  place: jax.Array,
  *,
  config: Vision,
) -> SlotImages:
  """Puts the embeddings of an image in their place.

  Args:
    params: part 'vision' of the parameters of the target.
    images: donated.
    pixels: u8[P, P, 3], as `vision.embed` takes them.
    place: i32[] of the B * J.
    config: sizes of the tower; static.
  """
  new = vision.embed(params, config, pixels)
  embeddings = images.embeddings.at[place].set(new)
  return images.replace(embeddings=embeddings)


@functools.partial(jax.jit, donate_argnames='images')
def assign(images: SlotImages, slot: jax.Array, index: jax.Array) -> SlotImages:
  """Returns the images with another request in a slot i32[].

  Args:
    images: donated.
    slot: slot of the request.
    index: i32[S] of its tokens.
  """
  return images.replace(index=images.index.at[slot].set(index))
