"""The vision tower of a model that reads images, as pure functions.

Legend: T tokens of the tower, E its width, D width of the decoder, I
embeddings of an image, P pixels of a side.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import products
from swiftspec_jax.config.architecture import Vision
from swiftspec_jax.models.params import Params


def embed(params: Params, config: Vision, pixels: jax.Array) -> jax.Array:
  """Returns the embeddings [I, D] that stand for an image.

  Args:
    params: part 'vision' of the parameters of a model.
    config: static sizes of the tower.
    pixels: u8[P, P, 3] red, green and blue.
  """
  dtype = params['patches'].dtype
  with jax.named_scope('vision'), products.at_full_precision(dtype):
    x = _patches(config, pixels).astype(dtype)
    x = x @ params['patches']
    if config.kind == 'clip':
      x = jnp.concatenate([params['class_token'][None], x])
    else:
      x = x + params['patches_bias'][None]
    x = x + params['positions']
    if config.kind == 'clip':
      x = _norm(x, params, 'norm', config)
    for layer in params['layers']:
      normed = _norm(x, layer, 'attention_norm', config)
      x = x + _attention(normed, layer, config)
      hidden = _linear(_norm(x, layer, 'ffw_norm', config), layer, 'up')
      x = x + _linear(_activated(hidden, config.activation), layer, 'down')
    if config.kind == 'clip' and not config.keeps_class_token:
      x = x[1:]
    hidden = _linear(x, params, 'projection_in')
    hidden = _activated(hidden, config.projector_activation)
    return _linear(hidden, params, 'projection_out')


def _patches(config: Vision, pixels: jax.Array) -> jax.Array:
  """Returns f32[patches, pixels of one x 3], row by row."""
  mean, std = (jnp.array(x)[None, None] for x in (config.mean, config.std))
  x = (pixels.astype(jnp.float32) / 255 - mean) / std
  size = config.patch_size
  side = config.image_size // size
  x = x[: side * size, : side * size].reshape(side, size, side, size, 3)
  return x.swapaxes(1, 2).reshape(side * side, -1)


def _attention(x: jax.Array, layer: Params, config: Vision) -> jax.Array:
  """Returns what each of x [T, E] attends to: all."""
  qkv = _linear(x, layer, 'qkv').reshape(len(x), 3, config.num_heads, -1)
  queries, keys, values = jnp.moveaxis(qkv, 1, 0)
  scores = jnp.einsum('the,she->hts', queries, keys).astype(jnp.float32)
  probs = jax.nn.softmax(scores * queries.shape[-1] ** -0.5).astype(x.dtype)
  attended = jnp.einsum('hts,she->the', probs, values)
  return _linear(attended.reshape(x.shape), layer, 'attention_out')


def _linear(x: jax.Array, params: Params, name: str) -> jax.Array:
  return x @ params[name] + params[f'{name}_bias'][None]


def _norm(x: jax.Array, params: Params, name: str, config: Vision) -> jax.Array:
  """Layer norm over the last axis, computed in float32."""
  wide = x.astype(jnp.float32)
  wide -= wide.mean(axis=-1, keepdims=True)
  variance = (wide * wide).mean(axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(variance + config.norm_eps)
  scale, bias = params[name][None], params[f'{name}_bias'][None]
  return (normed * scale).astype(x.dtype) + bias


def _activated(x: jax.Array, name: str) -> jax.Array:
  if name == 'quick_gelu':
    return x * jax.nn.sigmoid(1.702 * x)
  return jax.nn.gelu(x, approximate=name == 'gelu_tanh')
