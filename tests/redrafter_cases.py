"""ReDrafter heads with random weights, as apple/ml-recurrent-drafter saves
them, and what they compute in plain NumPy, path by path."""

import checkpoint_cases
import numpy as np
from scipy import special


def make_weights(width, vocab_size, *, head_width, num_blocks=2, rnn=True):
  """Tensors by their published names, [out, in]."""
  random = checkpoint_cases.Random().matrix

  weights = {f'lm_head.{num_blocks}.weight': 2 * random(vocab_size, head_width)}
  for i in range(num_blocks):
    weights[f'lm_head.{i}.linear.weight'] = random(head_width, head_width)
    weights[f'lm_head.{i}.linear.bias'] = random(head_width)
  if rnn:
    weights |= {
      'rnn_u.weight': random(width, width),
      'rnn_u.bias': random(width),
      'rnn_w.weight': random(width, width),
    }
  if head_width != 2 * width:
    weights['input_proj.weight'] = random(head_width, 2 * width)
    weights['input_proj.bias'] = random(head_width)
  return weights


def write(directory, weights, *, width, vocab_size, **changes):
  """Writes a head of `make_weights`."""
  num_blocks = sum(name.endswith('linear.bias') for name in weights)
  values = {
    'model_type': 'recurrent_drafting_drafter',
    'architectures': ['Drafter'],
    'hidden_size': width,
    'vocab_size': vocab_size,
    'exit_dim': weights[f'lm_head.{num_blocks}.weight'].shape[1],
    'num_draft_layers': num_blocks,
    'num_lookback_tokens': -1,
    'rnn': 'rnn_u.weight' in weights,
    **changes,
  }
  return checkpoint_cases.save(directory, values, weights)


def silu(x):
  return x / (1 + np.exp(-x))


def log_probs(weights, table, context, path):
  """Distribution after a path [V], whose first token is the last known one.

  Args:
    weights: of `make_weights`.
    table: embedding [V, D] of the target.
    context: the target's hidden state [D] before that token.
    path: tokens.
  """
  w = {name: x.astype(np.float64) for name, x in weights.items()}
  state = np.zeros(table.shape[1])
  for token in path:
    if 'rnn_u.weight' in w:
      state = silu(
        w['rnn_w.weight'] @ table[token]
        + w['rnn_u.weight'] @ state
        + w['rnn_u.bias']
      )
    else:
      state = state + table[token]
  x = np.concatenate([context, state])
  if 'input_proj.weight' in w:
    x = w['input_proj.weight'] @ x + w['input_proj.bias']
  num_blocks = sum(name.endswith('linear.bias') for name in w)
  for i in range(num_blocks):
    linear = f'lm_head.{i}.linear'
    x = x + silu(w[f'{linear}.weight'] @ x + w[f'{linear}.bias'])
  return special.log_softmax(w[f'lm_head.{num_blocks}.weight'] @ x)
