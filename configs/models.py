"""Sizes of models to plan for and to compile, as they were published."""

from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import (
  Experts,
  Gemma4,
  IRope,
  RopeScaling,
)

_LLAMA3 = {
  'family': 'llama',
  'vocab_size': 128_256,
  'max_context': 131_072,
  'norm_eps': 1e-5,
  'rope_theta': 500_000.0,
}


def _llama(
  num_layers, embed_dim, num_heads, head_dim, ffw_dim, **changes
) -> ModelConfig:
  return ModelConfig(
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=head_dim,
    ffw_dim=ffw_dim,
    **{**_LLAMA3, **changes},
  )


_SCALING = RopeScaling(kind='llama3', factor=32.0)
LLAMA_1B = _llama(16, 2048, 32, 64, 8192, rope_scaling=_SCALING)
LLAMA_3B = _llama(28, 3072, 24, 128, 8192, rope_scaling=_SCALING)
LLAMA_8B = _llama(32, 4096, 32, 128, 14_336, tie_embeddings=False)
LLAMA_70B = _llama(80, 8192, 64, 128, 28_672, tie_embeddings=False)


def _qwen2(num_layers, embed_dim, num_heads, ffw_dim, **changes) -> ModelConfig:
  return ModelConfig(
    family='qwen2',
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    head_dim=128,
    ffw_dim=ffw_dim,
    max_context=32_768,
    rope_theta=1e6,
    use_qkv_bias=True,
    **changes,
  )


# The target's table of embeddings is longer by padding.
QWEN2_1B5 = _qwen2(28, 1536, 12, 8960, num_kv_heads=2, vocab_size=151_936)
QWEN2_72B = _qwen2(
  80, 8192, 64, 29_568, num_kv_heads=8, vocab_size=152_064, tie_embeddings=False
)

# Three of four layers see chunks, and have rotary embedding.
LLAMA4_SCOUT = ModelConfig(
  family='llama4_text',
  vocab_size=202_048,
  num_layers=48,
  embed_dim=5120,
  num_heads=40,
  num_kv_heads=8,
  head_dim=128,
  ffw_dim=16_384,
  max_context=10_485_760,
  norm_eps=1e-5,
  rope_theta=500_000.0,
  rope_scaling=RopeScaling(kind='llama3', factor=16.0, high_freq_factor=1.0),
  tie_embeddings=False,
  sliding_window=8192,
  sliding_layers=(True, True, True, False) * 12,
  irope=IRope(nope_layers=tuple(range(3, 48, 4))),
  experts=Experts(
    num_experts=16,
    num_active=1,
    ffw_dim=8192,
    scales_inputs=True,
    has_shared=True,
  ),
)
GEMMA4_31B = ModelConfig(
  family='gemma4_text',
  vocab_size=262_144,
  num_layers=60,
  embed_dim=5376,
  num_heads=32,
  num_kv_heads=16,
  head_dim=256,
  ffw_dim=21_504,
  max_context=262_144,
  rope_theta=1e6,
  rope_scaling=RopeScaling(kind='proportional', factor=1.0, rotated_share=0.25),
  local_rope_theta=1e4,
  activation='gelu_tanh',
  use_qk_norm=True,
  use_post_norms=True,
  embed_scale=5376**0.5,
  query_scale=1.0,
  sliding_window=1024,
  sliding_layers=(True, True, True, True, True, False) * 10,
  gemma4=Gemma4(
    global_kv_heads=4,
    global_head_dim=512,
    num_kv_layers=60,
    shares_values=True,
  ),
  logit_cap=30.0,
)

NAMES = {
  'Llama-3.2-1B': LLAMA_1B,
  'Llama-3.2-3B': LLAMA_3B,
  'Llama-3-8B': LLAMA_8B,
  'Llama-3-70B': LLAMA_70B,
  'Qwen2-1.5B': QWEN2_1B5,
  'Qwen2-72B': QWEN2_72B,
}
