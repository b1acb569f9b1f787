"""Attention in packed rows, also where the last tokens are the draft's own.

A draft that reads features sees the target's up to the root of a chain, and its
own from there on. Pass k of the training-time test (EAGLE-3, section 3.2) is
that of a chain's k-th token, for all tokens of a row at once: with keys and
values of pass 1 for what stands k - 1 or more tokens back, and after that one
of each later pass.

Legend: B rows, S tokens, G kv heads, Q query heads for each kv head, E
head_dim.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kernels_pallas import products
from kernels_pallas.tree_attention import reference
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import attention, decoder

# Keys and values [B, S, G, E] of each layer.
Written = list[tuple[jax.Array, jax.Array]]


def take_previous(values: jax.Array, previous: jax.Array) -> jax.Array:
  """Returns the values [B, S, ...] of the tokens before, zeros for none.

  Args:
    values: [B, S, ...].
    previous: i32[B, S] as in `packing.Batch`.
  """
  shape = (*previous.shape, *(1,) * (values.ndim - 2))
  indices = previous.reshape(shape)
  taken = jnp.take_along_axis(values, jnp.maximum(indices, 0), axis=1)
  return jnp.where(indices >= 0, taken, jnp.zeros((), values.dtype))


def make_attend_fn(
  config: ModelConfig,
  rows: Mapping[str, jax.Array],
  earlier: Sequence[Written],
) -> tuple[attention.AttendFn, Written]:
  """Returns the attention of the next pass, and the list that it fills.

  Args:
    config: static configuration of the model.
    rows: arrays of `packing.Batch` by name.
    earlier: keys and values that the passes before wrote.
  """
  positions = rows['positions']
  distances = positions[:, :, None] - positions[:, None]
  visible = _visible(rows) & (distances >= len(earlier))
  if config.hides_first_token:  # as in `decoder.forward_with_features`
    visible &= (rows['previous'] >= 0)[:, None]
  near = visible
  if config.sliding_window is not None:
    near = visible & (distances < config.sliding_window)
  written: Written = []

  def attend(i, queries, keys, values):
    written.append((keys, values))
    is_visible = near if config.is_sliding(i) else visible
    scale = decoder.query_scale(config)
    if earlier:
      chain = _chain(i, [*earlier[1:], written], rows)
      return _attention(queries, *earlier[0][i], is_visible, chain, scale)
    keys, values = (jnp.moveaxis(x, 1, 2) for x in (keys, values))
    attended, _ = reference.attention_part(
      queries, keys, values, is_visible, scale
    )
    return attended

  return attend, written


def _visible(rows):
  """Returns bool[B, S, S]: the own piece, its prefix and the own branch."""
  pieces, branches = rows['pieces'], rows['branches']
  order = jnp.arange(pieces.shape[1])
  return (
    (order[None, :, None] >= order[None, None])
    & (pieces[:, :, None] == pieces[:, None])
    & ((branches[:, None] == 0) | (branches[:, :, None] == branches[:, None]))
  )


def _chain(i, passes, rows):
  """Keys, values and validity bool[B, S] of the own tokens of each chain.

  The last pass wrote the token itself, the one before it the token before, and
  so on.
  """
  chain = []
  for written in passes:
    chain = [
      tuple(take_previous(x, rows['previous']) for x in entry)
      for entry in chain
    ]
    keys, values = written[i]
    chain.append((keys, values, jnp.ones(rows['pieces'].shape, bool)))
  return chain


def _attention(queries, keys, values, visible, chain, scale):
  """Attention [B, S, G, Q, E] over pass 1 and a token of each later pass."""
  size = keys.shape[1]
  scores = [
    jnp.where(
      visible[:, None, None],
      _product('bsgqe,btge->bgqst', queries, keys) * scale,
      reference.MASKED_SCORE,
    )
  ]
  for own_keys, _, is_valid in chain:
    own = _product('bsgqe,bsge->bgqs', queries, own_keys) * scale
    own = jnp.where(is_valid[:, None, None], own, reference.MASKED_SCORE)
    scores.append(own[..., None])
  probs = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  probs = probs.astype(values.dtype)
  output = products.einsum('bgqst,btge->bsgqe', probs[..., :size], values)
  for i, (_, own_values, _) in enumerate(chain):
    output += jnp.einsum('bgqs,bsge->bsgqe', probs[..., size + i], own_values)
  return output


def _product(subscripts, queries, keys):
  return jnp.einsum(
    subscripts, queries, keys, preferred_element_type=jnp.float32
  )
