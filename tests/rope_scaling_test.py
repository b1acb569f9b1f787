"""Rotary scaling in all its spellings, and the context that follows from it."""

import pathlib

import numpy as np
import pytest
import transformers
from transformers import modeling_rope_utils

import swiftspec_jax as ss
from swiftspec_jax.checkpoint import gguf_rope, hf
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import layers, rope_scaling

SIZES = {
  'vocab_size': 300,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'intermediate_size': 48,
}
YARN = {'factor': 4.0, 'original_max_position_embeddings': 32768}
# As older files spell it, and as newer ones do.
OLD_YARN, NEW_YARN = {**YARN, 'type': 'yarn'}, {**YARN, 'rope_type': 'yarn'}
BETAS = {'beta_fast': 16.0, 'beta_slow': 2.0}
MSCALES = {'mscale': 1.0, 'mscale_all_dim': 0.5}
LONGROPE = {'short_factor': [1.0, 1.1, 1.2, 1.3], 'long_factor': [1, 2, 3, 9]}
LINEAR = {'type': 'linear', 'factor': 4.0}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
NO_SCALING = {'rope_type': 'linear', 'factor': 1.0}
FULL, SLIDING = 'full_attention', 'sliding_attention'
LOCAL = {'rope_type': 'default', 'rope_theta': 1e4}


def of(family, max_context, rope=None, **changes):
  scaling = {} if rope is None else {'rope_scaling': rope}
  return {
    'model_type': family,
    'max_position_embeddings': max_context,
    **scaling,
    **changes,
  }


OF_QWEN = 131072, [1.0, 0.03162278, 0.000625, 7.905694e-06], 1.1386294
PLAIN = [1.0, 0.1, 0.01, 0.001]
# What config.json says; the context that its model card names, or that vLLM
# derives, frequencies of a head of 8 and attention factor by transformers
# 5.24.0 (`test_transformers_computes_the_same`).
CASES = {
  # Qwen2.5-7B-Instruct, card, "Processing Long Texts".
  'yarn': (of('qwen2', 32768, OLD_YARN, rope_theta=1e6), OF_QWEN),
  # Qwen3-8B, card: the config.json counts 8,192 tokens of output.
  'yarn of 32768': (of('qwen3', 40960, NEW_YARN, rope_theta=1e6), OF_QWEN),
  # NousResearch/Yarn-Mistral-7b-128k.
  'yarn, finetuned': (
    of(
      'mistral',
      32768,
      {
        'type': 'yarn',
        'factor': 16.0,
        'finetuned': True,
        'original_max_position_embeddings': 8192,
      },
    ),
    (131072, [1.0, 0.1, 0.006874999, 0.000375], 1.2772589),
  ),
  'yarn without an original context': (
    of('llama', 2048, {'rope_type': 'yarn', 'factor': 4.0}),
    (8192, [1.0, 0.1, 0.00625, 0.00025], 1.1386294),
  ),
  'yarn with all entries': (
    of(
      'llama',
      131072,
      {
        'rope_type': 'yarn',
        'factor': 32.0,
        **BETAS,
        **MSCALES,
        'truncate': False,
      },
      original_max_position_embeddings=4096,
    ),
    (131072, [1.0, 0.1, 0.005817091, 3.125e-05], 1.1476935),
  ),
  # lmsys/vicuna-7b-v1.5-16k.
  'linear': (
    of('llama', 4096, LINEAR),
    (16384, [0.25, 0.025, 0.0025, 0.00025], 1.0),
  ),
  # internlm2-chat-7b.
  'dynamic': (
    of('llama', 32768, {'type': 'dynamic', 'factor': 2.0}, rope_theta=1e6),
    (65536, [1.0, 0.02192601, 0.0004807499, 1.054093e-05], 1.0),
  ),
  # Llama-3.1-8B: max_position_embeddings is the stretched context.
  'llama3': (
    of('llama', 131072, LLAMA3, rope_theta=5e5),
    (131072, [1.0, 0.03760603, 0.000524846, 6.64787e-06], 1.0),
  ),
  # Phi-3-mini-128k-instruct; the same in two spellings.
  'su': (
    of(
      'llama',
      131072,
      {'type': 'su', **LONGROPE},
      original_max_position_embeddings=4096,
    ),
    (131072, [1.0, 0.05, 0.003333333, 0.0001111111], 1.1902381),
  ),
  'longrope, short': (
    of(
      'llama',
      4096,
      {
        'rope_type': 'longrope',
        'original_max_position_embeddings': 4096,
        **LONGROPE,
      },
    ),
    (4096, [1.0, 0.09090909, 0.008333333, 0.0007692308], 1.0),
  ),
  # Phi-3-mini-4k-instruct.
  'none': (
    of('llama', 4096, original_max_position_embeddings=4096),
    (4096, PLAIN, 1.0),
  ),
  # Qwen2-VL: all axes of a text have the same position.
  'mrope': (
    of('qwen2', 32768, {'type': 'mrope', 'mrope_section': [1, 1, 2]}),
    (32768, PLAIN, 1.0),
  ),
  # gemma-3-4b-it: counts the stretched context.
  'gemma 3': (
    of('gemma3_text', 131072, {'rope_type': 'linear', 'factor': 8.0}),
    (131072, [0.125, 0.003952847, 0.000125, 3.952847e-06], 1.0),
  ),
  'rope_parameters': (
    of('qwen3', 32768, rope_parameters={**NEW_YARN, 'rope_theta': 1e6}),
    OF_QWEN,
  ),
  'rope_parameters by kind of layer': (
    of(
      'qwen3',
      32768,
      rope_parameters={FULL: {**NEW_YARN, 'rope_theta': 1e6}, SLIDING: LOCAL},
      layer_types=[FULL, SLIDING],
      sliding_window=16,
      use_sliding_window=True,
    ),
    OF_QWEN,
  ),
}


def read(values) -> ModelConfig:
  return hf.config_of(pathlib.Path('config.json'), {**SIZES, **values})


def found(config):
  scaling = config.rope_scaling
  frequencies = layers.rope_frequencies(8, config.rope_theta, scaling)
  return frequencies, scaling.attention_factor if scaling else 1.0


@pytest.mark.parametrize('name', CASES)
def test_context_and_frequencies(name):
  values, (context, frequencies, attention) = CASES[name]
  config = read(values)
  assert config.max_context == context
  np.testing.assert_allclose(found(config)[0], frequencies, rtol=1e-5)
  np.testing.assert_allclose(found(config)[1], attention, rtol=1e-6)
  assert ModelConfig.from_json(config.to_json()) == config
  if config.local_rope_theta is None:
    theta = {'rope_theta': config.rope_theta}
    again = read({**values, **theta, **rope_scaling.to_hf(config)})
    assert (again.max_context, found(again)[1]) == (context, found(config)[1])
    np.testing.assert_array_equal(found(again)[0], found(config)[0])


@pytest.mark.peers
@pytest.mark.parametrize('name', CASES)
def test_transformers_computes_the_same(name):
  values, (context, frequencies, attention) = CASES[name]
  scaling = read(values).rope_scaling
  theirs = transformers.AutoConfig.for_model(**SIZES, **values)
  layer_type = next((k for k in theirs.rope_parameters if k == FULL), None)
  rope = theirs.rope_parameters.get(FULL, theirs.rope_parameters)
  rope |= {'rope_type': scaling.kind} if scaling else NO_SCALING
  compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope['rope_type']]
  found = compute(theirs, seq_len=context, layer_type=layer_type)
  np.testing.assert_allclose(found[0], frequencies, rtol=1e-6)
  np.testing.assert_allclose(found[1], attention, rtol=1e-7)


LONGROPE_4 = {'type': 'longrope', **LONGROPE}


@pytest.mark.parametrize(
  ('scaling', 'message'),
  [
    ({'type': 'ntk'}, "unknown rope scaling 'ntk'; supported"),
    ({'type': ['su']}, 'unknown rope scaling .*su'),
    # Published with neither of the two names: it would change nothing.
    ({'factor': 2.0}, "default has no entry 'factor'; it has n"),
    ({'type': 'dynamic', 'factor': 2.0, 'alpha': 9}, "'alpha'"),
    ({**LINEAR, 'factor': '4'}, "factor='4' must be a positiv"),
    ({**LINEAR, 'factor': 0}, 'factor=0 must be a positive num'),
    ({'type': 'linear'}, 'factor'),
    ({'type': 'su'}, "longrope needs the entry 'short_factor'"),
    (
      {**LONGROPE_4, 'long_factor': [1.0, 2.0]},
      r'long_factor=\[1.0, 2.0\] must have 4 positive numbers',
    ),
    ({**OLD_YARN, 'truncate': 1}, 'truncate=1 must'),
  ],
)
def test_what_is_no_scaling_is_refused(scaling, message):
  with pytest.raises(ss.UserError, match=message):
    read(of('llama', 64, scaling))


@pytest.mark.parametrize(
  ('family', 'changes', 'message'),
  [
    ('llama', {'partial_rotary_factor': 0.5}, "'partial_rotary_factor'"),
    (
      'gemma3_text',
      {'rope_parameters': {**LINEAR, 'rope_type': 'linear'}},
      'rope_parameters=.*its entries are for all layers, or under full_att',
    ),
    (
      'gemma3_text',
      {'rope_parameters': {FULL: LOCAL, SLIDING: LINEAR}},
      'rope_parameters=.*sliding_attention has the rope_type default',
    ),
    (
      'llama',
      {'rope_parameters': {FULL: None, SLIDING: LOCAL}},
      'rope_parameters=.* is not supported',
    ),
  ],
)
def test_what_is_not_supported_is_refused(family, changes, message):
  with pytest.raises(ss.UserError, match=message):
    read(of(family, 64, **changes))


GGUF_YARN = {
  'scaling.type': 'yarn',
  'scaling.factor': 4.0,
  'scaling.original_context_length': 32768,
}


@pytest.mark.parametrize(
  ('keys', 'context', 'like', 'expected_context'),
  [
    ({}, 2048, None, 2048),
    ({'dimension_count': 8}, 2048, None, 2048),
    ({'scaling.type': 'none', 'scaling.factor': 4.0}, 2048, None, 2048),
    ({'scaling.factor': 0.0}, 2048, None, 2048),
    # Files of vicuna-7b-v1.5-16k, from 2023 and later.
    ({'scale_linear': 4.0}, 16384, LINEAR, 16384),
    ({'scaling.factor': 4.0, 'scale_linear': 2.0}, 16384, LINEAR, 16384),
    # Qwen 2.5 and 3, converted before and after the context was edited.
    (GGUF_YARN, 32768, OLD_YARN, 131072),
    (GGUF_YARN, 131072, OLD_YARN, 131072),
    ({**GGUF_YARN, 'scaling.finetuned': True}, 131072, OLD_YARN, 131072),
    # llama.cpp takes the context for the original one.
    ({'scaling.type': 'yarn', 'scaling.factor': 4.0}, 32768, OLD_YARN, 32768),
    (
      {
        **GGUF_YARN,
        'scaling.yarn_beta_fast': 16.0,
        'scaling.yarn_beta_slow': 2.0,
        'scaling.yarn_log_multiplier': 0.5,
        'scaling.yarn_ext_factor': 1.0,
      },
      32768,
      {**OLD_YARN, **BETAS, **MSCALES},
      131072,
    ),
    (
      GGUF_YARN | {'scaling.yarn_attn_factor': 1.5, 'scaling.attn_factor': 2.0},
      32768,
      {**OLD_YARN, 'attention_factor': 3.0},
      131072,
    ),
  ],
)
def test_keys_of_gguf_files(keys, context, like, expected_context):
  """They mean what an entry of config.json does."""
  expected = like and rope_scaling.from_hf(like, 32768, 8)[0]
  metadata = {f'qwen2.rope.{key}': value for key, value in keys.items()}
  found = gguf_rope.read(metadata, 'qwen2', context, 8)
  assert found == (expected, expected_context)


@pytest.mark.parametrize(
  ('keys', 'message'),
  [
    (
      {'scaling.type': 'longrope'},
      "unknown qwen2.rope.scaling.type 'longrope'; supported: none, linear, y",
    ),
    (
      {**GGUF_YARN, 'scaling.yarn_ext_factor': 0.5},
      'qwen2.rope.scaling.yarn_ext_factor=0.5 is not supported',
    ),
    ({'scaling.factor': -4.0}, 'factor=-4.0 must be a positive number'),
    ({'dimension_count': 4}, 'qwen2.rope.dimension_count=4 is not supported'),
  ],
)
def test_keys_of_gguf_files_that_are_refused(keys, message):
  metadata = {f'qwen2.rope.{key}': value for key, value in keys.items()}
  with pytest.raises(ss.UserError, match=message):
    gguf_rope.read(metadata, 'qwen2', 2048, 8)
