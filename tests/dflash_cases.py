"""DFlash drafts with random weights, in both published layouts, and what they
compute in plain NumPy.

The oracle knows nothing of caches: it reads all features of a text and a block
at once.
"""

import checkpoint_cases
import numpy as np
from checkpoint_cases import NUM_OUTPUTS, output_ids
from eagle3_cases import SIZES, attend, gated, rms_norm, rotate

SIZES = {**SIZES, 'model_type': 'qwen3', 'num_hidden_layers': 2}
NUM_HEADS, HEAD_DIM = SIZES['num_attention_heads'], SIZES['head_dim']
BLOCK, MASK = 5, 261


def make_weights(width, num_features, vocab_size=None):
  """Tensors [out, in]; those of 100 output tokens with `vocab_size`."""
  draw = checkpoint_cases.Random()
  random, norm = draw.matrix, draw.norm

  queries, keys = NUM_HEADS * HEAD_DIM, NUM_HEADS * HEAD_DIM // 2
  ffw = SIZES['intermediate_size']
  weights = {
    'fc.weight': random(width, num_features * width),
    'hidden_norm.weight': norm(width),
    'norm.weight': norm(width),
  }
  for i in range(SIZES['num_hidden_layers']):
    layer = {
      'input_layernorm': norm(width),
      'post_attention_layernorm': norm(width),
      'self_attn.q_proj': 2 * random(queries, width),
      'self_attn.k_proj': 2 * random(keys, width),
      'self_attn.v_proj': random(keys, width),
      'self_attn.o_proj': random(width, queries),
      'self_attn.q_norm': norm(HEAD_DIM),
      'self_attn.k_norm': norm(HEAD_DIM),
      'mlp.gate_proj': random(ffw, width),
      'mlp.up_proj': random(ffw, width),
      'mlp.down_proj': random(width, ffw),
    }
    weights |= {f'layers.{i}.{name}.weight': x for name, x in layer.items()}
  if vocab_size is not None:
    ids = output_ids(vocab_size)
    weights |= {
      'lm_head.weight': random(NUM_OUTPUTS, width),
      'd2t': ids - np.arange(NUM_OUTPUTS),
      't2d': np.isin(np.arange(vocab_size), ids),
    }
  return weights


def write(directory, layout, weights, *, layers, vocab_size, sizes=(), **extra):
  """Writes a draft that reads the outputs of the target's `layers`."""
  sizes = {
    **SIZES,
    'hidden_size': weights['fc.weight'].shape[0]
    if 'fc.weight' in weights
    else 32,
    'vocab_size': vocab_size,
    **dict(sizes),
  }
  if layout == 'speculators':
    outputs = weights.get('lm_head.weight', np.empty((vocab_size, 0)))
    values = {
      'architectures': ['DFlashSpeculator'],
      'speculators_model_type': 'dflash',
      'transformer_layer_config': sizes,
      'draft_vocab_size': len(outputs),
      'block_size': BLOCK,
      'mask_token_id': MASK,
      'aux_hidden_state_layer_ids': [i + 1 for i in layers],
    }
  else:
    values = {
      **sizes,
      'architectures': ['DFlashDraftModel'],
      'block_size': BLOCK,
      'dflash_config': {
        'mask_token_id': MASK,
        'target_layer_ids': list(layers),
      },
    }
  values |= extra
  return checkpoint_cases.save(directory, values, weights)


def block_hidden(
  weights, table, features, anchor, *, window=None, causal=False
):
  """Hidden states [b, D] of a block after features [T, layers * D].

  Args:
    weights: of `make_weights`.
    table: embedding [V, D].
    features: of all verified tokens.
    anchor: last known token.
    window: of all layers.
    causal: whether the block is, in all layers.
  """
  context = features.astype(np.float64) @ weights['fc.weight'].T
  context = rms_norm(context, weights['hidden_norm.weight'])
  x = table[[anchor] + [MASK] * (BLOCK - 1)].astype(np.float64)
  places = np.arange(len(features) + BLOCK)
  distances = places[-BLOCK:, None] - places[None]
  is_seen = distances < (window or len(places))
  if causal:
    is_seen &= distances >= 0
  for i in range(SIZES['num_hidden_layers']):

    def get(name, i=i):
      return weights[f'layers.{i}.{name}.weight'].astype(np.float64)

    def heads(rows, kind, get=get):
      return (rows @ get(f'self_attn.{kind}_proj').T).reshape(
        len(rows), -1, HEAD_DIM
      )

    normed = rms_norm(x, get('input_layernorm'))
    seen = np.concatenate([context, normed])
    queries = rms_norm(heads(normed, 'q'), get('self_attn.q_norm'))
    keys = rms_norm(heads(seen, 'k'), get('self_attn.k_norm'))
    queries, keys = rotate(queries, places[-BLOCK:]), rotate(keys, places)
    attended = attend(queries, keys, heads(seen, 'v'), is_seen)
    x = x + attended @ get('self_attn.o_proj').T
    normed = rms_norm(x, get('post_attention_layernorm'))
    x = x + gated(
      normed, *(get(f'mlp.{name}_proj') for name in ('gate', 'up', 'down'))
    )
  return rms_norm(x, weights['norm.weight'])


def draft(weights, table, head, text, features, **options):
  """The tokens after a text, and their logits.

  Args:
    weights: of `make_weights`.
    table: embedding [V, D].
    head: unembedding [V, D] of the target.
    text: tokens.
    features: [len(text) - 1, layers * D] of all tokens but the last.
    options: of `block_hidden`.
  """
  hidden = block_hidden(weights, table, features, text[-1], **options)
  logits = hidden[1:] @ weights.get('lm_head.weight', head).T
  index = logits.argmax(axis=1)
  ids = np.arange(len(head))
  if 'd2t' in weights:
    ids = np.arange(NUM_OUTPUTS) + weights['d2t']
  return ids[index].tolist(), logits
