"""Checkpoints of random tensors, and changes of those that are there."""

import json

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import swiftspec_jax as ss
from swiftspec_jax import testing
from swiftspec_jax.models.matrices import transposed

NUM_OUTPUTS = 100  # tokens that a draft can propose, if not all
MATRICES = {
  'qkv',
  'attention_out',
  'gate_up',
  'down',
  'experts_gate',
  'experts_up',
  'experts_down',
}


class Random:
  """Draws tensors, always the same ones."""

  def __init__(self):
    self._generator = np.random.default_rng(0)

  def matrix(self, *shape):
    values = self._generator.normal(0, shape[-1] ** -0.5, shape)
    return values.astype(np.float32)

  def norm(self, size):
    return self._generator.uniform(0.5, 1.5, size).astype(np.float32)


def output_ids(vocab_size):
  generator = np.random.default_rng(7)
  return np.sort(generator.permutation(vocab_size)[:NUM_OUTPUTS])


def save(directory, config, weights):
  """Writes a checkpoint; returns its directory."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config))
  safetensors_numpy.save_file(weights, directory / 'model.safetensors')
  return directory


def change_config(directory, **changes):
  path = directory / 'config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_tower(directory, rename, tower, **changes):
  """Makes a model the decoder of one that reads pictures, too.

  Args:
    directory: checkpoint of the model.
    rename: function of a tensor's name that returns the new one.
    tower: name of a tensor that no decoder has.
    **changes: entries of the new config.json.
  """
  values = json.loads((directory / 'config.json').read_text())
  tensors = safetensors_numpy.load_file(directory / 'model.safetensors')
  tensors = {rename(name): array for name, array in tensors.items()}
  tensors[tower] = np.zeros(4, np.float32)
  save(directory, {'text_config': values, **changes}, tensors)


def check_refused(directory, message, changes=(), **options):
  """A checkpoint with these entries of config.json is not loaded."""
  change_config(directory, **dict(changes))
  with pytest.raises(ss.UserError, match=message):
    ss.load(directory, **options)


def write_pair(directory, family, quantize, options, changes=None, **config):
  """Writes a quantized checkpoint, and beside it one of the same weights.

  Args:
    directory: folder for both.
    family: name of the family.
    quantize: function of a tensor's name, the tensor and a random generator
      that returns what the tensor becomes, and those that are stored for it, by
      name; None for what stays.
    options: quantization_config.
    changes: tensors of the first in the place of others; None for none.
    **config: entries of config.json.

  Returns:
    Both directories.
  """
  stored, plain = directory / 'stored', directory / 'plain'
  for path in (stored, plain):
    testing.write_tiny_checkpoint(path, family, **config)
  weights = safetensors_numpy.load_file(plain / 'model.safetensors')
  generator = np.random.default_rng(0)
  tensors = {}
  for name, weight in sorted(weights.items()):
    found = quantize(name, weight, generator)
    weights[name], own = found or (weight, {name: weight})
    tensors |= own
  tensors |= changes or {}
  tensors = {name: x for name, x in tensors.items() if x is not None}
  safetensors_numpy.save_file(tensors, stored / 'model.safetensors')
  safetensors_numpy.save_file(weights, plain / 'model.safetensors')
  change_config(stored, quantization_config=options)
  return stored, plain


def assert_weights(model, plain, dtype):
  """Quantized matrices of a model stand for exactly the weights of another."""
  layers, others = (
    transposed.undone(jax.device_get(x.params))['layers']
    for x in (model, plain)
  )
  for layer, other in zip(layers, others, strict=True):
    for name, expected in other.items():
      weights = layer[name]
      if name in MATRICES:
        assert weights.values.dtype == dtype
        weights = dense(weights)
        if 'experts' not in name:
          weights = np.moveaxis(weights, 0, 1).reshape(expected.shape)
      np.testing.assert_array_equal(weights, expected)


def dense(matrix):
  """The weights [P, K, N] of a quantized matrix."""
  values = matrix.values.astype(np.float32)
  size = values.shape[1] // matrix.scales.shape[1]
  weights = values * np.repeat(matrix.scales, size, axis=1)
  if getattr(matrix, 'offsets', None) is not None:
    weights += np.repeat(matrix.offsets, size, axis=1)
  return weights
