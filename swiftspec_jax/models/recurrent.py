"""A recurrent draft head (ReDrafter, arXiv 2403.09919, section 3.1).

Its hidden state is a pair, side by side: the target's last hidden state, the
same for all of a draft, and a state of its own. That begins with zeros after
each verdict and takes up one token after the other:

  state = silu([embedding of the token, state before] @ W + b)

So in a tree each node needs the pair of its parent, and nothing else.

Legend: B rows, T tokens, D embed, X width of the blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.models import layers
from swiftspec_jax.models.params import Params


def config_of(
  target: ModelConfig, head: Recurrent, output_vocab_size: int | None = None
) -> ModelConfig:
  """Returns the configuration of a head of a target.

  Args:
    target: configuration of the target.
    head: sizes.
    output_vocab_size: number of tokens that it can propose; None means all.
  """
  return dataclasses.replace(
    target,
    num_layers=0,
    sliding_window=None,
    sliding_layers=(),
    tie_embeddings=False,
    irope=None,
    experts=None,
    use_sinks=False,
    output_vocab_size=output_vocab_size,
    feature_layers=(target.num_layers - 1,),
    feature_dim=target.embed_dim,
    recurrent=head,
    num_shards=1,
    weight_dtype=None,
  )


def start(
  params: Params, config: ModelConfig, features: jax.Array
) -> jax.Array:
  """Returns the pairs [B, T, 2 D] at which drafts begin.

  Args:
    params: parameters of the head; `final_norm` is that of the target.
    config: static configuration of the head.
    features: [B, T, D] outputs of the target's last layer.
  """
  features = features.astype(params['embedding'].dtype)
  normed = layers.rms_norm(features, params['final_norm'], config.norm_eps)
  return jnp.concatenate([normed, jnp.zeros_like(normed)], axis=-1)


def step(
  params: Params, config: ModelConfig, embeddings: jax.Array, before: jax.Array
) -> jax.Array:
  """Returns the pairs [B, T, 2 D] after tokens.

  Args:
    params: parameters of the head.
    config: static configuration of the head.
    embeddings: [B, T, D] of the tokens.
    before: [B, T, 2 D] pair before each of them.
  """
  context, state = jnp.split(before.astype(embeddings.dtype), 2, axis=-1)
  if config.recurrent.is_sum:
    state = state + embeddings
  else:
    pair = jnp.concatenate([embeddings, state], axis=-1)
    state = jax.nn.silu(_affine(pair, params['recurrence']))
  return jnp.concatenate([context, state], axis=-1)


def outputs(params: Params, pairs: jax.Array) -> jax.Array:
  """Returns what the unembedding multiplies [B, T, X] of pairs [B, T, 2 D]."""
  x = pairs
  if 'head_input' in params:
    x = _affine(x, params['head_input'])
  for block in params['blocks']:
    x = x + jax.nn.silu(_affine(x, block))
  return x


def _affine(x, layer):
  return layers.product(x, layer['weight']) + layer['bias'][None, None]
