"""Names and shapes of the tensors of a tiny checkpoint, by family."""

from collections.abc import Iterator
from typing import Any

from swiftspec_jax.models.families import gemma4

_WITH_HEAD_NORMS = 'qwen3', 'qwen3_moe', 'gemma3_text', *gemma4.FAMILIES


def tensor_shapes(
  config: dict[str, Any],
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields names and shapes as transformers has them."""
  c = config
  embed = c['hidden_size']
  yield 'model.embed_tokens.weight', (c['vocab_size'], embed)
  yield 'model.norm.weight', (embed,)
  if not c['tie_word_embeddings']:
    yield 'lm_head.weight', (c['vocab_size'], embed)
  norms = ['input_layernorm', 'post_attention_layernorm']
  if c['model_type'] in ('gemma3_text', *gemma4.FAMILIES):
    norms += ['pre_feedforward_layernorm', 'post_feedforward_layernorm']
  if c['model_type'] in gemma4.FAMILIES:
    yield from _gemma4_shapes(c)
  for i in range(c['num_hidden_layers']):
    prefix = f'model.layers.{i}'
    for name in norms:
      yield f'{prefix}.{name}.weight', (embed,)
    yield from _attention_shapes(c, i)
    yield from _feed_forward_shapes(c, i)


def _attention_shapes(
  config: dict[str, Any], layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c, prefix = config, f'model.layers.{layer}.self_attn'
  embed = c['hidden_size']
  num_heads, num_kv_heads = c['num_attention_heads'], c['num_key_value_heads']
  head_dim = c.get('head_dim') or embed // num_heads
  names = ['q', 'k', 'v']
  if 'global_head_dim' in c and c['layer_types'][layer] == 'full_attention':
    head_dim = c['global_head_dim']
    if c.get('attention_k_eq_v'):
      num_kv_heads, names = c['num_global_key_value_heads'], ['q', 'k']
  if layer >= c['num_hidden_layers'] - c.get('num_kv_shared_layers', 0):
    names = ['q']
  for name in names:
    size = (num_heads if name == 'q' else num_kv_heads) * head_dim
    yield f'{prefix}.{name}_proj.weight', (size, embed)
    if c['model_type'] == 'qwen2' or c.get('attention_bias'):
      yield f'{prefix}.{name}_proj.bias', (size,)
    if c['model_type'] in _WITH_HEAD_NORMS and name != 'v':
      yield f'{prefix}.{name}_norm.weight', (head_dim,)
  yield f'{prefix}.o_proj.weight', (embed, num_heads * head_dim)
  if c['model_type'] == 'gpt_oss':
    yield f'{prefix}.o_proj.bias', (embed,)
    yield f'{prefix}.sinks', (num_heads,)


def _gemma4_shapes(
  config: dict[str, Any],
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c = config
  embed, num_layers = c['hidden_size'], c['num_hidden_layers']
  width = c.get('hidden_size_per_layer_input')
  if width:
    start, all_widths = 'model', num_layers * width
    table = f'{start}.embed_tokens_per_layer.weight'
    yield table, (c['vocab_size_per_layer_input'], all_widths)
    yield f'{start}.per_layer_model_projection.weight', (all_widths, embed)
    yield f'{start}.per_layer_projection_norm.weight', (width,)
  for i in range(num_layers):
    prefix = f'model.layers.{i}'
    yield f'{prefix}.layer_scalar', (1,)
    if width:
      yield f'{prefix}.per_layer_input_gate.weight', (width, embed)
      yield f'{prefix}.per_layer_projection.weight', (embed, width)
      yield f'{prefix}.post_per_layer_input_norm.weight', (embed,)
    if c.get('enable_moe_block'):
      num, ffw = c['num_experts'], c['moe_intermediate_size']
      yield f'{prefix}.router.proj.weight', (num, embed)
      yield f'{prefix}.router.scale', (embed,)
      yield f'{prefix}.router.per_expert_scale', (num,)
      yield f'{prefix}.experts.gate_up_proj', (num, 2 * ffw, embed)
      yield f'{prefix}.experts.down_proj', (num, embed, ffw)
      for name in ('pre_2', 'post_1', 'post_2'):
        place, number = name.split('_')
        norm = f'{place}_feedforward_layernorm_{number}'
        yield f'{prefix}.{norm}.weight', (embed,)


def _feed_forward_shapes(
  config: dict[str, Any], layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
  c, prefix = config, f'model.layers.{layer}.mlp'
  embed, parts = c['hidden_size'], {prefix: c['intermediate_size']}
  first_shared = c['num_hidden_layers'] - c.get('num_kv_shared_layers', 0)
  if c.get('use_double_wide_mlp') and layer >= first_shared:
    parts = {prefix: 2 * c['intermediate_size']}
  if c['model_type'] == 'llama4_text':
    prefix = f'model.layers.{layer}.feed_forward'
    parts = {prefix: c['intermediate_size_mlp']}
    if layer in c['moe_layers']:
      num, ffw = c['num_local_experts'], c['intermediate_size']
      yield f'{prefix}.router.weight', (num, embed)
      yield f'{prefix}.experts.gate_up_proj', (num, embed, 2 * ffw)
      yield f'{prefix}.experts.down_proj', (num, ffw, embed)
      parts = {f'{prefix}.shared_expert': ffw}
  if c['model_type'] == 'gpt_oss':
    num, ffw = c['num_local_experts'], c['intermediate_size']
    yield f'{prefix}.router.weight', (num, embed)
    yield f'{prefix}.router.bias', (num,)
    yield f'{prefix}.experts.gate_up_proj', (num, embed, 2 * ffw)
    yield f'{prefix}.experts.gate_up_proj_bias', (num, 2 * ffw)
    yield f'{prefix}.experts.down_proj', (num, ffw, embed)
    yield f'{prefix}.experts.down_proj_bias', (num, embed)
    return
  is_period = (layer + 1) % c.get('decoder_sparse_step', 1) == 0
  is_dense = layer in c.get('mlp_only_layers', ())
  if c['model_type'] == 'qwen3_moe' and is_period and not is_dense:
    yield f'{prefix}.gate.weight', (c['num_experts'], embed)
    parts = {
      f'{prefix}.experts.{j}': c['moe_intermediate_size']
      for j in range(c['num_experts'])
    }
  for part, ffw in parts.items():
    for name in ('gate', 'up'):
      yield f'{part}.{name}_proj.weight', (ffw, embed)
    yield f'{part}.down_proj.weight', (embed, ffw)
