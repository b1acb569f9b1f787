"""Attention of a decoder layer, between its two products.

Legend: B rows, T new tokens, G kv heads, Q query heads for each kv head, E
head_dim.
"""

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels_pallas.fused_attention import api, native, reference
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import layers
from swiftspec_jax.models.params import Params

# Layer, queries [B, T, G, Q, E], new keys and values [B, T, G, E], None where
# the layer sees those of another one -> attended [B, T, G, Q, E].
AttendFn = Callable[
  [int, jax.Array, jax.Array | None, jax.Array | None], jax.Array
]
# Layer, heads [B, T, G, Q + 2, E] that are not rotated, cos and sin f32[B, T,
# E / 2] -> attended [B, T, G, Q, E].
HeadsFn = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def over_layers(
  params: Params,
  config: ModelConfig,
  kept: list[Sequence[jax.Array]],
  *,
  kind_of: Callable[[int], Hashable],
  write: Callable[..., Sequence[jax.Array]],
  attend: Callable[..., jax.Array],
  attend_from_heads: Callable[..., tuple[jax.Array, Sequence[jax.Array]]],
) -> tuple[AttendFn, HeadsFn]:
  """Returns functions of all layers; those of a kind share a trace.

  Args:
    params: parameters of the model.
    config: configuration of the model.
    kept: keys and values of each layer that has some, replaced by those with
      the new tokens.
    kind_of: function of a layer; what layers of a kind see is the same.
    write: function of such a pair, and of new keys and values; returns the pair
      with them.
    attend: function of queries, a pair, sinks or None, and `kind`; returns what
      the queries read.
    attend_from_heads: function of what a HeadsFn takes, a pair, sinks or None,
      and `kind`; returns what is read, and the pair with the new tokens.
  """
  share = functools.partial(jax.jit, static_argnames='kind')
  write, attend = jax.jit(write), share(attend)
  attend_from_heads = share(attend_from_heads)

  def sinks_of(i):
    return params['layers'][i].get('sinks')

  def attend_in(i, queries, *new):
    if new[0] is not None:
      kept[i] = write(kept[i], new)
    pair = kept[config.kv_layer(i)]
    return attend(queries, pair, sinks_of(i), kind=kind_of(i))

  def attend_from_heads_in(i, *heads_and_angles):
    attended, kept[i] = attend_from_heads(
      heads_and_angles, kept[i], sinks_of(i), kind=kind_of(i)
    )
    return attended

  return attend_in, attend_from_heads_in


def rotates_alone(config: ModelConfig) -> bool:
  """Returns whether a rotation is all between the product and attention."""
  return suits_native(config) and not config.use_qk_norm


def suits_native(config: ModelConfig) -> bool:
  """Returns whether norms and rotation are all between the two."""
  return not (config.irope or config.gemma4)


def is_native(config: ModelConfig, mesh: Mesh | None) -> bool:
  """Returns whether kernels of one CPU do all from the product on."""
  return suits_native(config) and api.is_native_on(mesh, config.kernels)


def heads(
  qkv: jax.Array,
  layer: Params,
  config: ModelConfig,
  encoding: tuple[jax.Array, jax.Array] | jax.Array,
  *,
  rotates: bool = False,
) -> tuple[jax.Array | None, ...]:
  """Returns what an AttendFn takes of a layer, or a HeadsFn if it `rotates`.

  Args:
    qkv: [B, T, G, Q + 2, E] queries, key and value of each kv head, without
      biases; with fewer than two after the queries as `num_kv_parts` says.
    layer: parameters of the layer.
    config: sizes of the layer, of `ModelConfig.of_layer`.
    encoding: cosines and sines f32[B, T, E / 2]; of a layer without rotation
      the factors f32[B, T] of the queries.
    rotates: whether queries and keys are left to be rotated.
  """
  num_groups = config.num_query_groups
  if config.use_qkv_bias:
    qkv = qkv + layer['qkv_bias'][None, None]
  if rotates:
    if config.use_qk_norm:
      scales = layer['query_norm'], layer['key_norm']
      qkv = native.norm_heads(qkv, *scales, config.norm_eps)
    return qkv, *encoding
  queries, new_keys, new_values = qkv[:, :, :, :num_groups], None, None
  if config.num_kv_parts:
    # The same, where keys are values.
    new_keys, new_values = qkv[:, :, :, num_groups], qkv[:, :, :, -1]
  if config.use_qk_norm:
    queries = layers.rms_norm(queries, layer['query_norm'], config.norm_eps)
  if config.use_qk_norm and config.num_kv_parts:
    new_keys = layers.rms_norm(new_keys, layer['key_norm'], config.norm_eps)
  if config.gemma4 and config.num_kv_parts:
    scale = jnp.ones(config.head_dim)
    new_values = layers.rms_norm(new_values, scale, config.norm_eps)
  queries, new_keys = _encode_positions(queries, new_keys, config, encoding)
  return queries, new_keys, new_values


def _encode_positions(queries, keys, config, encoding):
  """Returns queries [B, T, G, Q, E] and keys [B, T, G, E] with positions."""
  if not isinstance(encoding, tuple):
    factors = encoding[:, :, None, None, None]
    return (queries.astype(jnp.float32) * factors).astype(queries.dtype), keys
  heads = queries.reshape(*queries.shape[:2], -1, config.head_dim)
  queries = reference.rotate(heads, *encoding).reshape(queries.shape)
  if keys is not None:
    keys = reference.rotate(keys, *encoding)
  if config.irope and config.irope.norms_rotated:
    scale = jnp.ones(config.head_dim)
    queries = layers.rms_norm(queries, scale, config.norm_eps)
    keys = layers.rms_norm(keys, scale, config.norm_eps)
  return queries, keys
