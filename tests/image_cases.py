"""A small LLaVA, and images for it."""

import json
import math
import zlib

import numpy as np
from safetensors import numpy as safetensors_numpy

from swiftspec_jax import testing
from swiftspec_jax.requests import images

TOWERS = ('clip', 'siglip')
SIZE, PATCH = 12, 4  # pixels
IMAGE_TOKEN_ID = 270
# The prompt that is recorded: texts, and images of these seeds.
PARTS = 'What is ', None, ' and ', None, '? '
SEEDS = 1, 2
NUM_NEW_TOKENS = 24
_WIDTH, _FFW, _NUM_LAYERS = 24, 40, 3
_TEMPLATE = (
  '<bos>{% for message in messages %}<|{{ message.role }}|>'
  "{% for part in message.content %}{% if part.type == 'image' %}"
  '<reserved_8>{% else %}{{ part.text }}{% endif %}{% endfor %}<eos>'
  '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


def write(directory, tower='clip', seed=0, family='llama', **overrides):
  """Writes a checkpoint as llava-hf publishes them."""
  testing.write_tiny_checkpoint(directory, family, seed=seed, **overrides)
  is_clip = tower == 'clip'
  text = json.loads((directory / 'config.json').read_text())
  config = {
    'model_type': 'llava',
    'text_config': text,
    'tie_word_embeddings': text['tie_word_embeddings'],
    'image_token_index': IMAGE_TOKEN_ID,
    'projector_hidden_act': 'gelu',
    'vision_feature_layer': -2,
    'vision_feature_select_strategy': 'default' if is_clip else 'full',
    'vision_config': {
      'model_type': f'{tower}_vision_model',
      'hidden_size': _WIDTH,
      'intermediate_size': _FFW,
      'num_hidden_layers': _NUM_LAYERS,
      'num_attention_heads': 2,
      'image_size': SIZE,
      'patch_size': PATCH,
    },
  }
  (directory / 'config.json').write_text(json.dumps(config))
  path = directory / 'model.safetensors'
  weights = {
    f'language_model.{name}': array
    for name, array in safetensors_numpy.load_file(path).items()
  }
  for name, shape in _shapes(is_clip, text['hidden_size']):
    weights[name] = _weights(name, shape, seed)
  safetensors_numpy.save_file(weights, path)
  square = {'height': SIZE, 'width': SIZE}
  preprocessing = {
    'do_center_crop': is_clip,
    'crop_size': square,
    'size': {'shortest_edge': SIZE} if is_clip else square,
    'image_mean': [0.48, 0.46, 0.41],
    'image_std': [0.27, 0.26, 0.28],
    'resample': 3,
  }
  text = json.dumps(preprocessing)
  (directory / 'preprocessor_config.json').write_text(text)
  (directory / 'chat_template.jinja').write_text(_TEMPLATE)


def _shapes(is_clip, embed):
  yield 'multi_modal_projector.linear_1.weight', (embed, _WIDTH)
  yield 'multi_modal_projector.linear_1.bias', (embed,)
  yield 'multi_modal_projector.linear_2.weight', (embed, embed)
  yield 'multi_modal_projector.linear_2.bias', (embed,)
  tower = 'vision_tower.vision_model'
  norms = [f'{tower}.post_layernorm']
  matrices = {}
  patches = (_WIDTH, 3, PATCH, PATCH)
  yield f'{tower}.embeddings.patch_embedding.weight', patches
  num_positions = (SIZE // PATCH) ** 2 + is_clip
  table = f'{tower}.embeddings.position_embedding.weight'
  yield table, (num_positions, _WIDTH)
  if is_clip:
    yield f'{tower}.embeddings.class_embedding', (_WIDTH,)
    norms.append(f'{tower}.pre_layrnorm')
  else:
    yield f'{tower}.embeddings.patch_embedding.bias', (_WIDTH,)
  for i in range(_NUM_LAYERS):
    layer = f'{tower}.encoder.layers.{i}'
    norms += [f'{layer}.layer_norm1', f'{layer}.layer_norm2']
    for name in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
      matrices[f'{layer}.self_attn.{name}'] = (_WIDTH, _WIDTH)
    matrices[f'{layer}.mlp.fc1'] = (_FFW, _WIDTH)
    matrices[f'{layer}.mlp.fc2'] = (_WIDTH, _FFW)
  for name in norms:
    yield f'{name}.weight', (_WIDTH,)
    yield f'{name}.bias', (_WIDTH,)
  for name, shape in matrices.items():
    yield f'{name}.weight', shape
    yield f'{name}.bias', shape[:1]


def _weights(name, shape, seed):
  # Raw bits are the same for every numpy, distributions need not be.
  bits = np.random.PCG64([seed, zlib.crc32(name.encode())])
  raw = bits.random_raw(math.prod(shape)).reshape(shape) >> 40
  unit = (raw / 2**24 - 0.5).astype(np.float32) * np.float32(12**0.5)
  if 'norm' in name and name.endswith('weight'):
    return 1 + 0.2 * unit
  if len(shape) == 1:
    return 0.5 * unit
  return unit / np.float32(math.prod(shape[1:]) ** 0.5)


def pixels(seed):
  """Returns u8[SIZE, SIZE, 3], all pixels different."""
  raw = np.random.PCG64(seed).random_raw(SIZE * SIZE * 3)
  return (raw % 256).astype(np.uint8).reshape(SIZE, SIZE, 3)


def image(seed):
  return images.Image(pixels=pixels(seed))


def prompt(*parts, num_tokens=9):
  """Returns the token ids of texts, and of images where a part is None."""
  found = []
  for part in parts:
    found += [IMAGE_TOKEN_ID] * num_tokens if part is None else part.encode()
  return tuple(found)
