"""The decoder: one forward pass for prefill, decoding and tree verification.

Legend: B rows, T new tokens, M cache rows under the attention mask, S cache
capacity, D embed, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas import products as products_lib
from kernels_pallas.few_rows import api as few_rows_api
from kernels_pallas.fused_attention import api as fused_api
from kernels_pallas.tree_attention import api as attention_api
from kernels_pallas.tree_attention import reference as attention_reference
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import (
  attention,
  feed_forward,
  layer_products,
  layers,
  recurrent,
)
from swiftspec_jax.models.cache import all_layers, dense
from swiftspec_jax.models.families import gemma4
from swiftspec_jax.models.params import Params


def _at_full_precision(fn):
  """Makes the products of a function of `params` at full precision."""

  @functools.wraps(fn)
  def call(*args, **options):
    dtype = args[0]['embedding'].dtype
    with products_lib.at_full_precision(dtype):
      return fn(*args, **options)

  return call


def forward(*args, **options) -> tuple[jax.Array, dense.KVCache]:
  """Returns what `forward_with_features` does, without features."""
  hidden, _, cache = forward_with_features(*args, **options)
  return hidden, cache


def forward_with_features(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  cache: dense.KVCache,
  *,
  starts: jax.Array,
  positions: jax.Array | None = None,
  attention_mask: jax.Array | None = None,
  context: int | None = None,
  features_before: jax.Array | None = None,
  feature_layers: tuple[int, ...] = (),
  is_real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, dense.KVCache]:
  """Runs the model over new tokens; writes but does not commit their KV.

  Args:
    params: parameters in the form of `param_specs(config)`.
    config: static sizes of the model.
    token_ids: i32[B, T] new tokens.
    cache: cache to read and write.
    starts: i32[B] first of the T rows that the tokens' keys and values go to.
    positions: i32[B, T] RoPE positions (prefix length + depth). None means
      the row: a chain.
    attention_mask: bool[B, T, M] which of the M rows after the prefix each
      token sees; the prefix is `cache.kv_lengths` rows, which all see. None
      means all rows up to the token's own: a chain.
    context: static bound for prefill: no token sees rows from here on. None is
      the capacity.
    features_before: [B, T, D] features of the tokens before, see `run_layers`.
    feature_layers: static indices of layers, see `run_layers`.
    is_real: bool[B, T] tokens that are no padding, see `run_layers`.

  Returns:
    Hidden states [B, T, D] before the final norm, features (see `run_layers`),
    and the cache.
  """
  chain = starts[:, None] + jnp.arange(token_ids.shape[1])[None]
  positions = chain if positions is None else positions
  # The chunks of a prompt are no work for kernels of few tokens. Those of CPUs
  # give a token the same bits in any company.
  kernels = config.kernels
  is_few, mesh = context is None, cache.sharding and cache.sharding.mesh
  if not is_few:
    kernels = few_rows_api.usable_on(mesh, kernels)
  is_native = attention.is_native(config, mesh)
  is_real = is_real if is_native else None
  attention_fn = attention_reference.tree_attention
  products = layer_products.PLAIN
  if kernels != dispatch.REFERENCE or is_few:
    attention_fn = functools.partial(
      attention_api.tree_attention,
      implementation=kernels,
      sharding=cache.sharding,
    )
    products = layer_products.on_devices(cache.sharding, kernels)
  seen_by = _visibility(
    config, cache, starts, positions, attention_mask, is_real
  )
  kept = list(zip(cache.keys, cache.values, strict=True))

  def write(pair, new):
    return [dense.write(x, y, starts) for x, y in zip(pair, new, strict=True)]

  def attend(queries, pair, sinks, *, kind):
    *seen, window = seen_by(kind)
    return attention_fn(
      queries,
      *(x[:, :, :context] for x in pair),
      *seen,
      scale=query_scale(config),
      window=window,
      sinks=sinks,
    )

  def attend_from_heads(heads_and_angles, pair, sinks, *, kind):
    *seen, window = seen_by(kind)
    attended, *written = fused_api.fused_attention(
      *heads_and_angles,
      *pair,
      starts,
      *seen,
      sinks,
      scale=query_scale(config),
      window=window,
      implementation=config.kernels,
      sharding=cache.sharding,
    )
    return attended, written

  attend_fn, heads_fn = attention.over_layers(
    params,
    config,
    kept,
    kind_of=config.is_sliding,
    write=write,
    attend=attend,
    attend_from_heads=attend_from_heads,
  )
  is_fused = is_native or (is_few and attention.rotates_alone(config))
  x, features = run_layers(
    params,
    config,
    token_ids,
    positions,
    attend_fn,
    attend_from_heads=heads_fn if is_fused else None,
    products=products,
    features_before=features_before,
    feature_layers=feature_layers,
    is_real=is_real,
  )
  return x, features, cache.replace(**all_layers.of_pairs(kept))


def _visibility(config, cache, starts, positions, attention_mask, is_real):
  """Returns a function of whether a layer has a window.

  It returns what tokens of the layer see: i32[B] rows of the prefix, the mask,
  and positions i32[B, T] at which a window ends, of that many rows.
  """
  prefix_lengths = starts if attention_mask is None else cache.kv_lengths

  def seen_by(is_sliding):
    mask, seen_from, window = attention_mask, positions, None
    if is_sliding:
      seen_from = layers.window_ends(positions, config)
      window = config.sliding_window
      if config.irope and mask is not None and mask.shape[2] == mask.shape[1]:
        # A chunk may begin inside of the tree that a target verifies. A draft's
        # rows are not its new tokens, and its nodes see all above them.
        mask &= seen_from[:, :, None] - positions[:, None] < window
    elif config.hides_first_token:
      # No feature comes before the first token, so the pair does not exist:
      # of a window of one row that ends at row 1, all see what is after it.
      seen_from, window = jnp.ones_like(positions), 1
    if is_real is not None:  # padding sees nothing
      seen_from = jnp.where(is_real, seen_from, -1)
    return prefix_lengths, mask, seen_from, window

  return seen_by


@_at_full_precision
def run_layers(
  params: Params,
  config: ModelConfig,
  token_ids: jax.Array,
  positions: jax.Array,
  attend_fn: attention.AttendFn,
  *,
  attend_from_heads: attention.HeadsFn | None = None,
  products: layer_products.Products = layer_products.PLAIN,
  features_before: jax.Array | None = None,
  feature_layers: tuple[int, ...] = (),
  is_real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs the model over tokens; what they attend to is up to `attend_fn`.

  Args:
    params: parameters in the form of `param_specs(config)`.
    config: static sizes of the model.
    token_ids: i32[B, T] tokens.
    positions: i32[B, T] RoPE positions.
    attend_fn: function that attends in a layer, called once for each in their
      order. Its queries and keys are rotated; it keeps the keys and values.
    attend_from_heads: function that rotates, too, and takes the place of
      `attend_fn`; None where the layers have more than a rotation.
    products: functions that make the products of a layer.
    features_before: [B, T, D] feature of the token before each one, where the
      model reads features. It is `project_features` of the target's outputs, or
      the model's own hidden state; zeros for the first token of a text.
    feature_layers: indices of layers whose outputs are features.
    is_real: bool[B, T] tokens that are no padding. The others are zeros, for
      which kernels of CPUs do no work; None does it for all.

  Returns:
    Hidden states [B, T, D] before the final norm (after it with
    `ModelConfig.returns_normed`), and the features [B, T, layers x D], one
    layer's after the other's, or None.
  """
  layer_of_kind = {config.is_sliding(i): i for i in range(config.num_layers)}
  angles_by_kind = {
    kind: layers.rope_angles(positions, config.of_layer(i), is_sliding=kind)
    for kind, i in layer_of_kind.items()
  }
  if config.irope:
    factors = layers.query_factors(positions, config.irope)
  x = layers.take_rows(params['embedding'], token_ids)
  x = x * jnp.asarray(config.embed_scale, x.dtype)
  if is_real is not None:
    x = jnp.where(is_real[..., None], x, 0)
  if config.recurrent:
    return recurrent.step(params, config, x, features_before), None
  inputs = [None] * config.num_layers
  if config.layer_input_dim:
    inputs = gemma4.layer_inputs(params, config, token_ids, x)
  pair = None
  if config.reads_features_before:
    x, pair = _fuse(params, config, x, features_before)
  # A layer rounds the same in all programs, whatever features or masks they
  # have.
  apart = products_lib.apart
  x, angles_by_kind = apart((x, angles_by_kind))
  # Layers of the same shapes share a trace, and a function of the program.
  share = functools.partial(jax.jit, static_argnames='config')
  before = share(
    functools.partial(_before_attention, rotates=attend_from_heads is not None)
  )
  after = share(functools.partial(_after_attention, products=products))
  # Of each layer, two arrays whose sum is its output.
  outputs, added = [], None
  for i, layer in enumerate(params['layers']):
    encoding = angles_by_kind[config.is_sliding(i)]
    if config.irope and i in config.irope.nope_layers:
      encoding = factors
    of_layer = config.of_layer(i)
    with jax.named_scope(f'layer_{i}'):
      x, *heads = before(
        x, added, layer, encoding, pair if i == 0 else None, config=of_layer
      )
      with jax.named_scope('attention'):
        attended = (attend_from_heads or attend_fn)(i, *heads)
      x, added = apart(after(x, attended, layer, inputs[i], config=of_layer))
    outputs.append((x, added))
  x = apart(layer_products.add(x, added))
  if config.returns_normed:
    x = layers.rms_norm(x, params['final_norm'], config.norm_eps)
  features = [layer_products.add(*outputs[i]) for i in feature_layers]
  return x, jnp.concatenate(features, axis=-1) if features else None


@jax.named_scope('fuse_features')
def _fuse(params, config, x, features):
  """Returns x [B, T, D], changed by features, and the pair of `_layer`."""
  normed = layers.rms_norm(features, params['feature_norm'], config.norm_eps)
  normed = normed.astype(x.dtype)
  if config.eagle3:
    is_normed = config.eagle3.norm_before_residual
    return x, (normed, normed if is_normed else features.astype(x.dtype))
  if config.is_mtp:
    x = layers.rms_norm(x, params['token_norm'], config.norm_eps)
    x = layers.product(x, params['token_fusion'])
  return x + layers.product(normed, params['feature_fusion']), None


@_at_full_precision
def project_features(
  params: Params, config: ModelConfig, features: jax.Array
) -> jax.Array:
  """Returns what a draft reads of its target's outputs [B, T, H]: [B, T, D].

  The first step of a feature-fed head (EAGLE-3, section 3): layers of several
  depths become one vector that can stand in for a hidden state of the draft.
  """
  if config.recurrent:
    return recurrent.start(params, config, features)
  if config.is_mtp:
    features = features.astype(params['embedding'].dtype)
    scale = params['target_feature_norm']
    return layers.rms_norm(features, scale, config.norm_eps)
  table = params['feature_projection']
  if 'target_feature_norm' in params:
    num_parts = len(config.feature_layers) if config.eagle3.fc_norm else 1
    scales = jnp.split(params['target_feature_norm'], num_parts)
    parts = [
      layers.rms_norm(part, scale, config.norm_eps)
      for part, scale in zip(
        jnp.split(features, num_parts, axis=-1), scales, strict=True
      )
    ]
    features = jnp.concatenate(parts, axis=-1)
  return layers.product(features.astype(table.dtype), table)


@_at_full_precision
def keys_and_values(
  params: Params,
  config: ModelConfig,
  features: jax.Array,
  positions: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns what the layers of a draft of blocks see of a text.

  Each layer makes keys and values of the same normed features, with the weights
  that it has for its own tokens (DFlash, arXiv 2602.06036).

  Args:
    params: parameters of the draft.
    config: configuration of the draft.
    features: [B, T, H] outputs of the target's layers.
    positions: i32[B, T] RoPE positions.

  Returns:
    Keys, rotated, and values, each [B, T, G, E] for each layer.
  """
  context = project_features(params, config, features)
  context = layers.rms_norm(context, params['feature_norm'], config.norm_eps)
  keys, values = [], []

  for i, layer in enumerate(params['layers']):
    angles = layers.rope_angles(
      positions, config, is_sliding=config.is_sliding(i)
    )
    qkv = layers.product(context, layer['qkv'])
    _, new_keys, new_values = attention.heads(qkv, layer, config, angles)
    keys.append(new_keys)
    values.append(new_values)
  return keys, values


def query_scale(config: ModelConfig) -> float:
  """Returns the factor of the attention scores."""
  return config.query_scale or config.head_dim**-0.5


def _before_attention(x, added, layer, encoding, pair, *, config, rotates):
  """Returns x + added [B, T, D], and the results of `attention.heads`.

  That sum is left to the product after the next norm. `added` is None in front
  of the first layer. Where there is a `pair`, it is the normed feature that is
  attended with beside x, and what is added to in the place of x.
  """
  scale = layer['attention_norm']
  if pair is None:
    x, qkv = layer_products.of_norm(
      x, added, scale, layer['qkv'], config, layers.product
    )
  else:
    normed = layers.rms_norm(x, scale, config.norm_eps)
    feature, x = pair
    normed = jnp.concatenate([normed, feature], axis=-1)
    qkv = layers.product(normed, layer['qkv'])
  return x, *attention.heads(qkv, layer, config, encoding, rotates=rotates)


def _after_attention(x, attended, layer, inputs, *, config, products):
  """Returns two arrays [B, T, D] whose sum is the output of a layer.

  Attended [B, T, G, Q, E] is what its tokens attend to; `inputs` are of
  `gemma4.layer_inputs`.
  """
  attended = attended.reshape(*attended.shape[:2], -1)
  attended = layer_products.project(attended, layer['attention_out'], products)
  if config.use_output_bias:
    attended = attended + layer['attention_out_bias'][None, None]
  if config.use_post_norms:
    attended = layers.rms_norm(
      attended, layer['post_attention_norm'], config.norm_eps
    )
  x, hidden = feed_forward.outputs(x, attended, layer, config, products)
  if config.use_post_norms:
    hidden = layers.rms_norm(hidden, layer['post_ffw_norm'], config.norm_eps)
  if config.gemma4:
    return gemma4.output(x + hidden, layer, config, inputs), None
  return x, hidden


@_at_full_precision
def before_unembedding(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns what the unembedding multiplies of hidden states [B, T, D]."""
  if config.recurrent:
    return recurrent.outputs(params, hidden)
  if config.returns_normed:
    return hidden
  return layers.rms_norm(hidden, params['final_norm'], config.norm_eps)


@_at_full_precision
def unembed(
  params: Params, config: ModelConfig, hidden: jax.Array
) -> jax.Array:
  """Returns logits of hidden states [B, T, D].

  They are f32[B, T, V]; with a reduced output vocabulary of V' tokens they are
  f32[B, T, V'], and logit i belongs to token `params['output_token_ids'][i]`.
  """
  x = before_unembedding(params, config, hidden)
  table = params.get('unembedding', params['embedding'])
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(table, layers.TABLES):
    logits = table.scores(rows)
  else:
    multiply = products_lib.multiply_transposed
    if config.num_shards == 1:
      multiply = functools.partial(
        few_rows_api.few_rows,
        implementation=few_rows_api.usable(config.kernels),
      )
    logits = products_lib.look_up_scores(rows, table, multiply)
  logits = layers.cap(logits, config.logit_cap)
  return logits.reshape(*x.shape[:2], -1)[..., : config.num_logits]


def token_ids_of(
  params: Params, config: ModelConfig, indices: jax.Array
) -> jax.Array:
  """Returns the token ids that indices of logits stand for."""
  if config.output_vocab_size is None:
    return indices
  return params['output_token_ids'][indices]


def widen_logits(
  params: Params, config: ModelConfig, logits: jax.Array
) -> jax.Array:
  """Returns logits f32[B, T, V]: -inf for tokens that the model lacks.

  Args:
    params: parameters of the model.
    config: static sizes of the model.
    logits: logits from `unembed`.
  """
  if config.num_logits == config.vocab_size:
    return logits
  if config.output_vocab_size is None:
    padding = ((0, 0), (0, 0), (0, config.vocab_size - config.num_logits))
    return jnp.pad(logits, padding, constant_values=-jnp.inf)
  wide = jnp.full((*logits.shape[:2], config.vocab_size), -jnp.inf)
  return wide.at[:, :, params['output_token_ids']].set(logits)
