"""Vision towers: Hugging Face configurations and parameter names."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config.architecture import Vision
from swiftspec_jax.models.params import Params

_KINDS = {'clip_vision_model': 'clip', 'siglip_vision_model': 'siglip'}
_ACTIVATIONS = {
  'quick_gelu': 'quick_gelu',
  'gelu': 'gelu',
  'gelu_pytorch_tanh': 'gelu_tanh',
}
# Of the preprocessing.
_STEPS = {
  'do_resize': True,
  'do_rescale': True,
  'do_normalize': True,
  'do_pad': False,
}


def vision_from_hf(values: Mapping[str, Any]) -> Vision:
  """Translates the complete Hugging Face configuration of a LLaVA.

  Args:
    values: `transformers.LlavaConfig.to_dict()`.

  Raises:
    UserError: a tower or option that is not supported.
  """
  tower = values['vision_config']
  _check(tower, 'model_type', _KINDS)
  _check(tower, 'hidden_act', _ACTIVATIONS)
  _check(values, 'projector_hidden_act', _ACTIVATIONS)
  _check(values, 'multimodal_projector_bias', (True,))
  _check(values, 'vision_feature_select_strategy', ('default', 'full'))
  # Of the outputs of all layers and what goes into the first one.
  outputs = range(tower['num_hidden_layers'] + 1)
  layer = values['vision_feature_layer']
  if layer not in (*outputs, *(i - len(outputs) for i in outputs)):
    raise errors.UserError(
      f'vision_feature_layer={layer!r} is not supported; it must be one layer '
      f'of the {len(outputs) - 1} of the tower'
    )
  kind = _KINDS[tower['model_type']]
  is_full = values['vision_feature_select_strategy'] == 'full'
  if kind == 'siglip' and not is_full:
    raise errors.UserError(
      "vision_feature_select_strategy='default' leaves out a class token, "
      'which SigLIP has not; it must be full'
    )
  return Vision(
    kind=kind,
    image_token_id=values['image_token_index'],
    image_size=tower['image_size'],
    patch_size=tower['patch_size'],
    num_layers=outputs[layer],
    embed_dim=tower['hidden_size'],
    num_heads=tower['num_attention_heads'],
    ffw_dim=tower['intermediate_size'],
    norm_eps=tower['layer_norm_eps'],
    activation=_ACTIVATIONS[tower['hidden_act']],
    projector_activation=_ACTIVATIONS[values['projector_hidden_act']],
    keeps_class_token=kind == 'clip' and is_full,
  )


def preprocessing_from_hf(
  values: Mapping[str, Any], image_size: int
) -> dict[str, Any]:
  """Returns the fields of Vision that `preprocessor_config.json` decides.

  Args:
    values: entries of the file.
    image_size: pixels of a side that the tower takes.

  Raises:
    UserError: it asks for something else than resizing, cutting out the middle
      and normalising.
  """
  lacks = 'preprocessor_config.json lacks a usable entry: '
  with errors.explained(lacks, (KeyError, TypeError, ValueError)):
    size, crops = values['size'], bool(values.get('do_center_crop'))
    fields = {
      'mean': tuple(map(float, values['image_mean'])),
      'std': tuple(map(float, values['image_std'])),
      'crops': crops,
      'resample': int(values['resample']),
    }
  names = {'shortest_edge'} if crops else {'height', 'width'}
  is_usual = not isinstance(size, Mapping) or set(size) == names
  crop_size = values.get('crop_size')
  sides = _sides(size) | (_sides(crop_size) if crops else set())
  if not is_usual or sides != {image_size}:
    raise errors.UserError(
      f'preprocessor_config.json has size={size!r}, crop_size={crop_size!r}, '
      f'do_center_crop={crops}; with these the sizes must have '
      f'{" and ".join(sorted(names))} of {image_size} pixels'
    )
  for name, expected in _STEPS.items():
    if bool(values.get(name, expected)) != expected:
      raise errors.UserError(
        f'{name}={values[name]!r} in preprocessor_config.json is not supported'
      )
  return fields


def _sides(size: Any) -> set:
  return set(size.values()) if isinstance(size, Mapping) else {size}


def _check(values: Mapping[str, Any], name: str, supported: Any) -> None:
  if values[name] not in supported:
    raise errors.UserError(
      f'{name}={values[name]!r} is not supported; supported: '
      f'{", ".join(map(str, supported))}'
    )


def params_from_hf(
  get: Callable[..., np.ndarray], config: Vision, embed_dim: int
) -> Params:
  """Returns the numpy arrays of a tower and its projections.

  Args:
    get: function from name and shape to the tensor.
    config: sizes of the tower.
    embed_dim: width of the decoder.
  """
  width, size = config.embed_dim, config.patch_size
  is_clip = config.kind == 'clip'
  tower = 'vision_tower'

  def linear(name, key, num_in, num_out):
    return {
      key: get(f'{name}.weight', num_out, num_in).T,
      f'{key}_bias': get(f'{name}.bias', num_out),
    }

  def norm(name, key):
    scale = get(f'{name}.weight', width).astype(np.float32)
    return {key: scale, f'{key}_bias': get(f'{name}.bias', width)}

  def layer(i):
    prefix = f'{tower}.encoder.layers.{i}'
    names = [f'{prefix}.self_attn.{x}_proj' for x in 'qkv']
    weights = [get(f'{name}.weight', width, width).T for name in names]
    biases = [get(f'{name}.bias', width) for name in names]
    return {
      **norm(f'{prefix}.layer_norm1', 'attention_norm'),
      'qkv': np.concatenate(weights, axis=1),
      'qkv_bias': np.concatenate(biases),
      **linear(f'{prefix}.self_attn.out_proj', 'attention_out', width, width),
      **norm(f'{prefix}.layer_norm2', 'ffw_norm'),
      **linear(f'{prefix}.mlp.fc1', 'up', width, config.ffw_dim),
      **linear(f'{prefix}.mlp.fc2', 'down', config.ffw_dim, width),
    }

  embeddings = f'{tower}.embeddings'
  patches = get(f'{embeddings}.patch_embedding.weight', width, 3, size, size)
  num_positions = config.num_patches + is_clip
  arrays = {
    # [E, 3, y, x] -> [y, x, 3, E]
    'patches': patches.transpose(2, 3, 1, 0).reshape(-1, width),
    'positions': get(
      f'{embeddings}.position_embedding.weight', num_positions, width
    ),
    'layers': [layer(i) for i in range(config.num_layers)],
    **linear(
      'multi_modal_projector.linear_1', 'projection_in', width, embed_dim
    ),
    **linear(
      'multi_modal_projector.linear_2', 'projection_out', embed_dim, embed_dim
    ),
  }
  if is_clip:
    arrays['class_token'] = get(f'{embeddings}.class_embedding', width)
    return {**arrays, **norm(f'{tower}.pre_layrnorm', 'norm')}
  arrays['patches_bias'] = get(f'{embeddings}.patch_embedding.bias', width)
  return arrays
