"""Models in .gguf files: converted tiny checkpoints, and broken files."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import transformers
from checkpoint_test import assert_same_params
from rope_scaling_test import LLAMA3
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.config.architecture import RopeScaling

KIND = gguf.GGMLQuantizationType
# What a .gguf file can say: the scaling of Llama 3.1, and Gemma's pattern.
GGUF_CASES = {
  'llama': {},
  'llama3': {
    'rope_theta': 500_000.0,
    'rope_scaling': LLAMA3,
  },
  'qwen2': {},
  'qwen3': {},
  'gemma3_text': {
    'num_hidden_layers': 7,
    'layer_types': None,
    'query_pre_attn_scalar': 16,
  },
}
ARCHITECTURES = {'llama3': 'llama', 'gemma3_text': 'gemma3'}


def write_gguf(
  path,
  directory,
  family,
  kind=KIND.F32,
  *,
  changes=None,
  options=(),
  split_max_tensors=0,
):
  """Converts a tiny checkpoint in the manner of llama.cpp.

  `changes` replaces tensors, None drops one; `options` are names and arguments
  of GGUFWriter's methods; `split_max_tensors` writes pieces.
  """
  config = json.loads((directory / 'config.json').read_text())
  weights = safetensors_numpy.load_file(directory / 'model.safetensors')
  architecture = ARCHITECTURES.get(family, family)
  writer = gguf.GGUFWriter(
    path, architecture, split_max_tensors=split_max_tensors
  )
  add_metadata(writer, config)
  for method, argument in options:
    getattr(writer, method)(argument)
  names = gguf.get_tensor_name_map(
    gguf.MODEL_ARCH[architecture.upper()], config['num_hidden_layers']
  )
  for name, array in {**weights, **(changes or {})}.items():
    if array is None:
      continue
    if family == 'gemma3_text' and name.endswith('norm.weight'):
      array = array + 1
    num_heads = {
      'q_proj': config['num_attention_heads'],
      'k_proj': config['num_key_value_heads'],
    }.get(name.split('.')[-2])
    if architecture == 'llama' and num_heads:
      array = permute(array, num_heads)
    name = names.get_name(name, try_suffixes=('.weight', '.bias'))
    add_tensor(writer, name, array, kind)
  if family == 'llama3':
    # Wavelengths 6, 167, 4443 and 118143: kept, kept, blended, stretched.
    divisors = np.array([1, 1, 2.6945297, 8], np.float32)
    writer.add_tensor('rope_freqs.weight', divisors)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def tiny_gguf(directory, family='llama', kind=KIND.F32, sizes=None, **options):
  """Writes a tiny checkpoint and, beside it, the file that it returns."""
  testing.write_tiny_checkpoint(directory, family, **(sizes or {}))
  path = directory / 'model.gguf'
  write_gguf(path, directory, family, kind, **options)
  return path


def permute(array, num_heads):
  rows = array.reshape(num_heads, 2, -1, *array.shape[1:])
  return rows.swapaxes(1, 2).reshape(array.shape)


def add_tensor(writer, name, array, kind):
  block_size, _ = gguf.GGML_QUANT_SIZES[kind]
  if array.ndim == 1 or array.shape[-1] % block_size:
    kind = KIND.F32
  writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def add_metadata(writer, config):
  writer.add_block_count(config['num_hidden_layers'])
  writer.add_context_length(config['max_position_embeddings'])
  writer.add_embedding_length(config['hidden_size'])
  writer.add_feed_forward_length(config['intermediate_size'])
  writer.add_head_count(config['num_attention_heads'])
  writer.add_head_count_kv(config['num_key_value_heads'])
  writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
  writer.add_rope_freq_base(config['rope_theta'])
  if 'head_dim' in config:
    writer.add_key_length(config['head_dim'])
    writer.add_value_length(config['head_dim'])
  if config['model_type'] == 'gemma3_text':
    writer.add_sliding_window(config['sliding_window'])
  tokenizer = testing.byte_tokenizer(config['vocab_size'])
  tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('gpt-2')
  writer.add_token_list([*tokens[:-1], 'th'])
  normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
  writer.add_token_types(
    [normal] * 256 + [control] * (len(tokens) - 257) + [normal]
  )
  writer.add_token_merges(['t h'])
  writer.add_eos_token_id(config['eos_token_id'])


@pytest.mark.parametrize(
  ('family', 'kind'),
  [
    *((family, KIND.F32) for family in GGUF_CASES),
    *(('llama', kind) for kind in (KIND.F16, KIND.BF16, KIND.Q8_0)),
  ],
)
def test_gguf_equals_the_directory(family, kind, tmp_path):
  path = tiny_gguf(tmp_path, family, kind, GGUF_CASES[family])

  directory, file = ss.load(tmp_path), ss.load(path)

  steps = {KIND.F32: 1e-7, KIND.F16: 1e-3, KIND.BF16: 1e-2, KIND.Q8_0: 1e-2}
  assert_same_params(file, directory, atol=0.7 * steps[kind], rtol=1e-6)
  expected = dataclasses.replace(
    directory.config,
    norm_eps=file.config.norm_eps,
    query_scale=file.config.query_scale,
  )
  assert file.config == expected
  # float32 in the file.
  np.testing.assert_allclose(file.config.norm_eps, directory.config.norm_eps)
  head_scale = file.config.head_dim**-0.5
  assert (file.config.query_scale or head_scale) == (
    directory.config.query_scale or head_scale
  )


@pytest.mark.parametrize(
  ('family', 'options', 'expected'),
  [
    (
      'llama',
      [
        ('add_rope_scaling_type', gguf.RopeScalingType.LINEAR),
        ('add_rope_scaling_factor', 4.0),
      ],
      {'rope_scaling': RopeScaling(kind='linear', factor=4.0)},
    ),
    ('llama', [('add_eot_token_id', 259)], {'eos_token_ids': (257, 259)}),
    (
      'gemma3_text',
      [('add_sliding_window_pattern', 2), ('add_rope_freq_base_swa', 500.0)],
      {'sliding_layers': (True, False, True), 'local_rope_theta': 500.0},
    ),
  ],
)
def test_options_of_gguf_files(family, options, expected, tmp_path):
  config = ss.load(tiny_gguf(tmp_path, family, options=options)).config

  for field, value in expected.items():
    assert getattr(config, field) == value


@pytest.fixture(scope='module')
def gguf_file(tmp_path_factory):
  return tiny_gguf(tmp_path_factory.mktemp('gguf'))


def test_a_gguf_file_cut_anywhere(gguf_file, tmp_path):
  content = gguf_file.read_bytes()
  path = tmp_path / 'cut.gguf'
  sizes = [0, 1, 4, 8, 20, *np.linspace(24, len(content) - 64, 40, dtype=int)]
  for size in sizes:
    path.write_bytes(content[:size])
    with pytest.raises(ss.UserError, match='not a complete GGUF file'):
      ss.load(path)


def test_a_gguf_file_with_damaged_bytes(gguf_file, tmp_path):
  """It loads (a weight has changed) or is refused, but nothing crashes."""
  content = bytearray(gguf_file.read_bytes())
  path = tmp_path / 'damaged.gguf'
  rng = np.random.default_rng(0)
  num_refused = 0
  for place in rng.integers(0, 6000, 30):
    damaged = content.copy()
    damaged[place] ^= rng.integers(1, 256)
    path.write_bytes(damaged)
    try:
      ss.load(path)
    except ss.UserError:
      num_refused += 1
  assert num_refused


@pytest.mark.parametrize(
  ('changes', 'options', 'message'),
  [
    (
      {'model.layers.1.mlp.up_proj.weight': None},
      [],
      r'tensor blk\.1\.ffn_up\.weight is missing',
    ),
    (
      {'model.norm.weight': np.ones(33, np.float32)},
      [],
      r'\(33,\), the config says \(32,\)',
    ),
    (
      {'model.layers.0.self_attn.o_proj.bias': np.ones(32, np.float32)},
      [],
      r'blk\.0\.attn_output\.bias',
    ),
    (
      {},
      [('add_rope_scaling_type', gguf.RopeScalingType.LONGROPE)],
      r"model\.gguf: unknown llama\.rope\.scaling\.type 'longrope'",
    ),
    (
      {},
      [('add_feed_forward_length', [48, 48])],
      r'differs between layers: \[48, 48\]',
    ),
  ],
)
def test_unusable_gguf_files(changes, options, message, tmp_path):
  path = tiny_gguf(tmp_path, changes=changes, options=options)

  with pytest.raises(ss.UserError, match=message):
    ss.load(path)


def test_unknown_gguf_architecture(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / 'model.gguf', 'mamba')
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()

  with pytest.raises(ss.UserError, match="unknown architecture 'mamba'"):
    ss.load(tmp_path / 'model.gguf')


def test_a_file_of_several_is_named_by_a_glob(tmp_path):
  """One of them is in pieces."""
  checkpoint, folder = tmp_path / 'checkpoint', tmp_path / 'folder'
  testing.write_tiny_checkpoint(checkpoint, 'llama')
  (folder / 'more').mkdir(parents=True)
  write_gguf(folder / 'tiny-f32.gguf', checkpoint, 'llama')
  pieces = folder / 'more' / 'tiny-q8_0.gguf'
  write_gguf(pieces, checkpoint, 'llama', KIND.Q8_0, split_max_tensors=5)
  assert len(list(pieces.parent.iterdir())) > 2
  write_gguf(tmp_path / 'whole.gguf', checkpoint, 'llama', KIND.Q8_0)
  for file, expected in (
    ('*q8_0.gguf', tmp_path / 'whole.gguf'),
    ('*f32.gguf', folder / 'tiny-f32.gguf'),
  ):
    found = ss.load(folder, file=file)
    assert_same_params(found, ss.load(expected), atol=0)
    assert ss.load(f'{folder}:{file}').config == found.config
  with pytest.raises(ss.UserError, match=r'it names tiny-f32.gguf, tiny-q8_0'):
    ss.load(folder, file='*')
  with pytest.raises(ss.UserError, match=r'there are tiny-f32.gguf, tiny-q8'):
    ss.load(folder, file='*q4_k_m.gguf')
  next(pieces.parent.glob('*-00002-of-*')).unlink()
  with pytest.raises(ss.UserError, match=r'-00002-of-.* not a complete GGUF'):
    ss.load(folder, file='*q8_0.gguf')


def test_a_gguf_file_must_exist(tmp_path):
  with pytest.raises(ss.UserError, match=r'none\.gguf'):
    ss.load(tmp_path / 'none.gguf')


@pytest.mark.peers
@pytest.mark.parametrize(
  ('family', 'changes'),
  [
    ('llama', {}),
    ('qwen2', {}),
    # The one size that transformers takes for granted.
    ('qwen3', {'head_dim': 128}),
    ('gemma3_text', {'head_dim': 256, 'query_pre_attn_scalar': 256}),
  ],
)
def test_transformers_reads_the_same(family, changes, tmp_path):
  """So the files above are what others take for this model, too."""
  torch = pytest.importorskip('torch')
  tiny_gguf(tmp_path, family, sizes={**GGUF_CASES[family], **changes})
  models = [
    transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path, gguf_file=file, dtype=torch.float32
    )
    for file in ('model.gguf', None)
  ]

  token_ids = torch.arange(40)[None]
  with torch.no_grad():
    file, directory = (model(token_ids).logits.numpy() for model in models)

  np.testing.assert_allclose(file, directory, atol=1e-4)
