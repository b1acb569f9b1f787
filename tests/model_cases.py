"""What models_test.py and golden/record_models.py both compute."""

import json
import pathlib

import numpy as np

# name: (family, changes of config.json)
CASES = {
  'llama': ('llama', {}),
  'llama_tied': ('llama', {'tie_word_embeddings': True}),
  'llama_linear_rope': (
    'llama',
    {'rope_scaling': {'type': 'linear', 'factor': 4.0}},
  ),
  'llama_odd_sizes': (
    'llama',
    {
      'hidden_size': 45,
      'num_attention_heads': 9,
      'num_key_value_heads': 3,
      'head_dim': 6,
      'intermediate_size': 47,
      'vocab_size': 271,
    },
  ),
  'llama3': ('llama3', {}),
  'mistral': ('mistral', {}),
  'mistral_without_window': ('mistral', {'sliding_window': None}),
  'qwen2': ('qwen2', {}),
  'qwen2_window': (
    'qwen2',
    {
      'use_sliding_window': True,
      'sliding_window': 16,
      'max_window_layers': 1,
      'tie_word_embeddings': False,
    },
  ),
  'qwen3': ('qwen3', {}),
  'qwen3_moe': ('qwen3_moe', {}),
  'qwen3_moe_period': (
    'qwen3_moe',
    {
      'decoder_sparse_step': 2,
      'mlp_only_layers': [],
      'norm_topk_prob': False,
      'num_experts_per_tok': 3,
    },
  ),
  'gpt_oss': ('gpt_oss', {}),
  'llama4': ('llama4', {}),
  'llama4_without_norms': (
    'llama4',
    {
      'use_qk_norm': False,
      'attn_temperature_tuning': False,
      'num_experts_per_tok': 2,
    },
  ),
  'qwen3_yarn': (
    'qwen3',
    {
      'rope_scaling': {
        'rope_type': 'yarn',
        'factor': 4.0,
        'original_max_position_embeddings': 256,
      }
    },
  ),
  'gemma3_text': ('gemma3_text', {}),
  'gemma3_text_linear_rope': (
    'gemma3_text',
    {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
  ),
  # As the 31b, the 12b, the 26b-a4b, and e2b and e4b.
  'gemma4_text': ('gemma4_text', {}),
  'gemma4_unified': ('gemma4_text', {'model_type': 'gemma4_unified_text'}),
  'gemma4_experts': (
    'gemma4_text',
    {
      'enable_moe_block': True,
      'num_experts': 6,
      'top_k_experts': 2,
      'moe_intermediate_size': 20,
    },
  ),
  'gemma4_layer_inputs': (
    'gemma4_text',
    {
      'num_hidden_layers': 5,
      'layer_types': [
        'sliding_attention',
        'full_attention',
        'sliding_attention',
        'sliding_attention',
        'full_attention',
      ],
      'attention_k_eq_v': False,
      'num_kv_shared_layers': 2,
      'use_double_wide_mlp': True,
      'hidden_size_per_layer_input': 8,
      'vocab_size_per_layer_input': 272,
    },
  ),
}

# Longer than the windows of 16 tokens.
NUM_TOKENS = 40
# A tree after this many of the tokens; a parent of -1 is the prefix.
NUM_PREFIX = 24
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 6)


def golden() -> dict:
  """Returns what golden/record_models.py has recorded."""
  return json.loads(
    (pathlib.Path(__file__).parent / 'golden/models.json').read_text()
  )


def token_ids() -> np.ndarray:
  """Returns i32[NUM_TOKENS], the tokens of all cases."""
  return (np.arange(NUM_TOKENS, dtype=np.int32) * 97 + 13) % 251


def tree_depths() -> np.ndarray:
  """Returns i32[nodes], 0 for children of the prefix."""
  depths = []
  for parent in PARENTS:
    depths.append(0 if parent < 0 else depths[parent] + 1)
  return np.array(depths, np.int32)


def tree_mask() -> np.ndarray:
  """Returns bool[nodes, nodes], True where a node sees another."""
  mask = np.eye(len(PARENTS), dtype=bool)
  for node, parent in enumerate(PARENTS):
    if parent >= 0:
      mask[node] |= mask[parent]
  return mask


def tree_path(node: int) -> list[int]:
  """Returns the nodes from the prefix to `node`."""
  return np.flatnonzero(tree_mask()[node]).tolist()


def sample(logits: np.ndarray) -> np.ndarray:
  """Returns the part of [tokens, V] logits that is recorded."""
  return logits[::3, 5::31]


# Chat turns for SmolLM2.
CHAT_PROMPTS = (
  'Hi! Who are you?',
  'Write a short poem about the sea.',
  'What is 17 plus 25? Explain step by step.',
  'Write a Python function that reverses a string.',
  'List five European capitals.',
  'Explain photosynthesis to a child in two sentences.',
  'Übersetze auf Deutsch: "The weather is nice today."',
  'Summarise: The quick brown fox jumps over the lazy dog, then sleeps.',
  'Return a JSON object with the keys "name" and "age".',
  'Repeat the word "echo" ten times.',
  'Give me a recipe for pancakes with blueberries.',
  'Tell me a joke about computers. 😀',
)
# Texts for Gemma 3 to go on with.
PLAIN_PROMPTS = (
  'The capital of France is',
  'def fibonacci(n):\n',
  'Once upon a time, in a village by the river,',
  '1, 2, 3, 4, 5, 6, 7, 8,',
)
NUM_NEW_TOKENS = 64
