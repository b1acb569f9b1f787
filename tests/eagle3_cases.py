"""EAGLE-3 heads with random weights, in the layouts in which people publish
them, and what they compute in plain NumPy.

The oracle knows nothing of caches: it reads pairs of a token and the feature of
the token before it, all at once.
"""

import checkpoint_cases
import numpy as np
from checkpoint_cases import NUM_OUTPUTS, output_ids

MASK = 261
SIZES = {
  'model_type': 'llama',
  'num_hidden_layers': 1,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 12,
  'intermediate_size': 40,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-5,
  'rope_theta': 500.0,
  'max_position_embeddings': 64,
}


def make_weights(width, vocab_size, num_features, **switches):
  """Tensors as SafeAILab names them, [out, in]."""
  draw = checkpoint_cases.Random()
  random, norm = draw.matrix, draw.norm

  queries, keys, ffw = 4 * 12, 2 * 12, SIZES['intermediate_size']
  ids = output_ids(vocab_size)
  layer = {
    'hidden_norm': norm(width),
    'input_layernorm': norm(width),
    'post_attention_layernorm': norm(width),
    'self_attn.q_proj': random(queries, 2 * width),
    'self_attn.k_proj': random(keys, 2 * width),
    'self_attn.v_proj': random(keys, 2 * width),
    'self_attn.o_proj': random(width, queries),
    'mlp.gate_proj': random(ffw, width),
    'mlp.up_proj': random(ffw, width),
    'mlp.down_proj': random(width, ffw),
  }
  weights = {f'midlayer.{name}.weight': x for name, x in layer.items()} | {
    'fc.weight': random(width, num_features * width),
    'norm.weight': norm(width),
    'lm_head.weight': random(NUM_OUTPUTS, width),
    'd2t': ids - np.arange(NUM_OUTPUTS),
    't2d': np.isin(np.arange(vocab_size), ids),
  }
  if switches.get('norm_before_fc'):
    weights['input_norm.weight'] = norm(num_features * width)
  if switches.get('is_parallel'):
    weights['mask_hidden'] = random(1, 1, num_features * width)
  if switches.get('fc_norm'):
    for i in range(num_features):
      weights[f'fc_norm.{i}.weight'] = norm(width)
  return weights


def write(directory, layout, weights, *, inputs=None, vocab_size, **switches):
  """Writes a head that reads what goes into the layers `inputs`."""
  width = weights['norm.weight'].shape[0]
  sizes = {**SIZES, 'hidden_size': width, 'vocab_size': vocab_size}
  is_parallel = switches.pop('is_parallel', False)
  values = {'draft_vocab_size': NUM_OUTPUTS, **switches}
  key = 'eagle_aux_hidden_state_layer_ids'
  if layout == 'speculators':
    weights = {
      name.replace('midlayer', 'layers.0'): x for name, x in weights.items()
    }
    values |= {
      'architectures': ['Eagle3Speculator'],
      'speculators_model_type': 'eagle3',
      'transformer_layer_config': sizes,
      key: inputs,
    }
    if is_parallel:
      values |= {'speculators_model_type': 'peagle', 'mask_token_id': MASK}
  else:
    values |= sizes
    values['architectures'] = ['LlamaForCausalLMEagle3']
    if layout == 'sglang':
      outputs = [i - 1 for i in inputs]
      values['eagle_config'] = {key: outputs, 'use_aux_hidden_state': True}
    else:
      values['architectures'] = ['LlamaForCausalLM']
  return checkpoint_cases.save(directory, values, weights)


def rms_norm(x, scale):
  x = x.astype(np.float64)
  mean = (x * x).mean(-1, keepdims=True)
  return x / np.sqrt(mean + SIZES['rms_norm_eps']) * scale


def rotate(x, positions):
  """Rotates [T, heads, E]."""
  half = x.shape[-1] // 2
  frequencies = SIZES['rope_theta'] ** -(np.arange(half) / half)
  angles = positions[:, None, None] * frequencies
  first, second = x[..., :half], x[..., half:]
  return np.concatenate(
    [
      first * np.cos(angles) - second * np.sin(angles),
      second * np.cos(angles) + first * np.sin(angles),
    ],
    axis=-1,
  )


def attend(queries, keys, values, is_seen):
  """Heads [T, H, E] over rows [S, G, E], of which two heads share one."""
  keys, values = (np.repeat(x, 2, axis=1) for x in (keys, values))
  scores = np.einsum('the,she->hts', queries, keys)
  scores = np.where(is_seen, scores / np.sqrt(queries.shape[2]), -np.inf)
  probs = np.exp(scores - scores.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  return np.einsum('hts,she->the', probs, values).reshape(len(queries), -1)


def gated(x, gate, up, down):
  gate = x @ gate.T
  return (gate / (1 + np.exp(-gate)) * (x @ up.T)) @ down.T


def project(weights, features):
  """What a head makes of features [T, layers * D] of its target."""
  features = features.astype(np.float64)
  if 'input_norm.weight' in weights:
    features = rms_norm(features, weights['input_norm.weight'])
  width = weights['norm.weight'].shape[0]
  if 'fc_norm.0.weight' in weights:
    parts = np.split(features, features.shape[1] // width, axis=1)
    parts = [
      rms_norm(x, weights[f'fc_norm.{i}.weight']) for i, x in enumerate(parts)
    ]
    features = np.concatenate(parts, axis=1)
  return features @ weights['fc.weight'].T


def forward(weights, embeddings, features, *, first=0, before=False):
  """Reads pairs, embeddings [T, D] and features [T, D] of the tokens before.

  Args:
    weights: of `make_weights`.
    embeddings: of the tokens.
    features: of `project`, or outputs of the head.
    first: position of the first pair.
    before: `norm_before_residual`.

  Returns:
    Outputs [T, D], and logits [T, V'].
  """

  def get(name):
    return weights[f'midlayer.{name}.weight'].astype(np.float64)

  size = len(embeddings)
  positions = first + np.arange(size)
  normed = rms_norm(features, get('hidden_norm'))
  pair = np.concatenate(
    [rms_norm(embeddings, get('input_layernorm')), normed], axis=1
  )
  heads = SIZES['head_dim']
  queries, keys, values = (
    (pair @ get(f'self_attn.{name}_proj').T).reshape(size, -1, heads)
    for name in 'qkv'
  )
  queries, keys = rotate(queries, positions), rotate(keys, positions)
  attended = attend(queries, keys, values, np.tri(size, dtype=bool))
  x = (normed if before else features) + attended @ get('self_attn.o_proj').T
  normed = rms_norm(x, get('post_attention_layernorm'))
  out = x + gated(
    normed, *(get(f'mlp.{name}_proj') for name in ('gate', 'up', 'down'))
  )
  return out, rms_norm(out, weights['norm.weight']) @ weights[
    'lm_head.weight'
  ].T


def draft(weights, table, text, features, length, **switches):
  """A chain after a text, and the logits of its tokens.

  Args:
    weights: of `make_weights`.
    table: embedding [V, D].
    text: tokens.
    features: [len(text) - 1, H] of all tokens but the last.
    length: of the chain.
    switches: as `write`.
  """
  ids = np.arange(NUM_OUTPUTS) + weights['d2t']
  known, before = list(text), project(weights, features)
  norm_output = switches.get('norm_output')
  found = []
  for _ in range(length):
    out, logits = forward(
      weights,
      table[known[1:]],
      before,
      before=switches.get('norm_before_residual'),
    )
    found.append(logits[-1])
    known.append(int(ids[logits[-1].argmax()]))
    out = rms_norm(out, weights['norm.weight']) if norm_output else out
    before = np.concatenate([before, out[-1:]])
  return known[len(text) :], np.array(found)


def draft_at_once(weights, table, text, features, length, **switches):
  """The same of a head that drafts with masks, in one forward (P-EAGLE)."""
  ids = np.arange(NUM_OUTPUTS) + weights['d2t']
  masks = weights['mask_hidden'][0].repeat(length - 1, axis=0)
  _, logits = forward(
    weights,
    table[[*text[1:], *[MASK] * (length - 1)]],
    project(weights, np.concatenate([features, masks])),
    before=switches.get('norm_before_residual'),
  )
  logits = logits[-length:]
  return ids[logits.argmax(axis=1)].tolist(), logits
