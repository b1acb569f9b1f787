"""The decoder: one forward pass for prefill, decoding and tree verification.

Legend: B rows, T new tokens, M cache rows under the attention mask, S cache
capacity, D embed, V vocabulary.
"""

import jax
import jax.numpy as jnp

from swiftspec_jax.cache import dense
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import layers
from swiftspec_jax.models.params import Params


def visible_rows(
  kv_lengths: jax.Array, attention_mask: jax.Array, context: int
) -> jax.Array:
  """Returns bool[B, T, context]: the whole prefix, and behind it the mask.

  Args:
    kv_lengths: i32[B] rows of the prefix.
    attention_mask: bool[B, T, M] over the M rows behind the prefix.
    context: number of rows of the result.
  """
  offsets = jnp.arange(context)[None] - kv_lengths[:, None]
  size = attention_mask.shape[2]
  behind = jnp.take_along_axis(
    attention_mask, jnp.clip(offsets, 0, size - 1)[:, None], axis=2
  )
  is_behind = (offsets >= 0) & (offsets < size)
  return (offsets < 0)[:, None] | (behind & is_behind[:, None])


def forward(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  cache: dense.KVCache,
  *,
  starts: jax.Array,
  positions: jax.Array | None = None,
  attention_mask: jax.Array | None = None,
  context: int | None = None,
) -> tuple[jax.Array, dense.KVCache]:
  """Runs the model over new tokens; writes but does not commit their KV.

  Args:
    params: as `params.param_specs(config)` says.
    config: static.
    token_ids: i32[B, T] new tokens.
    cache: to read and write.
    starts: i32[B] the tokens' keys and values go to the T rows from here.
    positions: i32[B, T] RoPE positions (prefix length + depth). None means
      the row: a chain.
    attention_mask: bool[B, T, M] which of the M rows behind the prefix (of
      `cache.kv_lengths` rows, visible to all) each token sees. None means all
      rows up to the token's own: a chain.
    context: static; no token sees rows from here on. None is the capacity.

  Returns:
    Hidden states [B, T, D] before the final norm, and the cache.
  """
  chain = starts[:, None] + jnp.arange(token_ids.shape[1])[None]
  positions = chain if positions is None else positions
  context = cache.capacity if context is None else context
  rows = jnp.arange(context)[None, None]
  if attention_mask is None:
    visible = rows <= chain[:, :, None]
  else:
    visible = visible_rows(cache.kv_lengths, attention_mask, context)
  visible_by_kind, angles_by_kind = {False: visible}, {}
  if config.sliding_window is not None:
    # Rows of the prefix and of a chain lie at their position; a tree is
    # shallower than the window (the caller checks).
    near = positions[:, :, None] - rows < config.sliding_window
    visible_by_kind[True] = visible & near
  for kind in {config.is_sliding(i) for i in range(config.num_layers)}:
    angles_by_kind[kind] = layers.rope_angles(
      positions, config, is_sliding=kind
    )

  x = params['embedding'][token_ids]
  x = x * jnp.asarray(config.embed_scale, x.dtype)
  keys, values = [], []
  for i, layer in enumerate(params['layers']):
    kind = config.is_sliding(i)
    with jax.named_scope(f'layer_{i}'):
      x, k, v = _layer(
        x,
        layer,
        config,
        (cache.keys[i], cache.values[i]),
        starts,
        visible_by_kind[kind],
        angles_by_kind[kind],
      )
    keys.append(k)
    values.append(v)
  return x, cache.replace(keys=keys, values=values)


def _layer(x, layer, config, rows, starts, visible, angles):
  """One decoder layer; returns x [B, T, D] and the layer's new cache rows."""
  normed = layers.rms_norm(x, layer['attention_norm'], config.norm_eps)
  attended, keys, values = _attention_block(
    normed, layer, config, rows, starts, visible, angles
  )
  if config.use_post_norms:
    attended = layers.rms_norm(
      attended, layer['post_attention_norm'], config.norm_eps
    )
  x = x + attended
  normed = layers.rms_norm(x, layer['ffw_norm'], config.norm_eps)
  gate_up = _product(normed, layer['gate_up'], 1)
  hidden = layers.gated_activation(gate_up, config.activation)
  hidden = _product(hidden, layer['down'], 1)
  if config.use_post_norms:
    hidden = layers.rms_norm(hidden, layer['post_ffw_norm'], config.norm_eps)
  return x + hidden, keys, values


def _attention_block(x, layer, config, rows, starts, visible, angles):
  num_groups = config.num_query_groups
  batch, length = x.shape[:2]
  qkv = _product(x, layer['qkv'], 1)
  if config.use_qkv_bias:
    qkv = qkv + layer['qkv_bias'][None, None]
  queries, new_keys = qkv[:, :, :, :num_groups], qkv[:, :, :, num_groups]
  new_values = qkv[:, :, :, num_groups + 1]
  if config.use_qk_norm:
    queries = layers.rms_norm(queries, layer['query_norm'], config.norm_eps)
    new_keys = layers.rms_norm(new_keys, layer['key_norm'], config.norm_eps)
  queries = layers.apply_rope(
    queries.reshape(batch, length, -1, config.head_dim), *angles
  ).reshape(queries.shape)
  new_keys = layers.apply_rope(new_keys, *angles)
  keys = dense.write(rows[0], new_keys, starts)
  values = dense.write(rows[1], new_values, starts)
  scale = config.query_scale or config.head_dim**-0.5
  context = visible.shape[2]
  attended = layers.attention(
    queries, keys[:, :, :context], values[:, :, :context], visible, scale
  )
  output = _product(
    attended.reshape(batch, length, -1), layer['attention_out'], 3
  )
  return output, keys, values


def _product(x, weight, num_in_axes):
  """x [B, T, in] times a weight whose first axes are the inputs."""
  out_shape = weight.shape[num_in_axes:]
  # The output axes are not merged: one of them may be sharded.
  weight = weight.reshape(x.shape[-1], *out_shape)
  product = jnp.tensordot(x.reshape(-1, x.shape[-1]), weight, axes=1)
  return product.reshape(*x.shape[:2], *out_shape)


def unembed(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns logits f32[B, T, V] of hidden states [B, T, D]."""
  x = layers.rms_norm(hidden, params['final_norm'], config.norm_eps)
  table = params.get('unembedding', params['embedding'])
  # Vocabulary first: the table is read row by row as it lies in memory.
  logits = jnp.einsum(
    'vd,btd->vbt', table, x, preferred_element_type=jnp.float32
  )
  return jnp.moveaxis(logits, 0, -1)[..., : config.vocab_size]
