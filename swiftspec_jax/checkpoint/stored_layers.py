"""The matrices of a layer, joined from those that a checkpoint has quantized.

Legend: P parts, K inputs, N outputs.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.families import llama4
from swiftspec_jax.models.matrices.quantization import StoredMatrix
from swiftspec_jax.models.params import Params

# From name, K and N to the matrix of one part: [1, K, N], or a plain [K, N].
Read = Callable[[str, int, int], StoredMatrix | np.ndarray]


def read(config: ModelConfig, read: Read, prefix: str, layer: int) -> Params:
  """Returns the matrices of a layer; see `param_specs`.

  Args:
    config: the model's.
    read: function that reads one matrix of the checkpoint.
    prefix: start of the names of the layer.
    layer: number of the layer.

  Raises:
    UserError: only some parts of a matrix are quantized, or a router is.
  """
  c = config.of_layer(layer)
  query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

  def by_kv_head(arrays):
    parts = [
      x.reshape(x.shape[1], c.num_kv_heads, -1, c.head_dim) for x in arrays
    ]
    parts = families.as_rotated(parts, c, 3)
    return np.concatenate(parts, axis=2).reshape(1, arrays[0].shape[1], -1)

  def joined(join, shape, num_inputs, outputs: Mapping[str, int]):
    parts = {
      name: read(f'{prefix}{name}', num_inputs, num_outputs)
      for name, num_outputs in outputs.items()
    }
    return _joined(parts, join, shape)

  def one(name, shape, num_inputs, num_outputs):
    return joined(np.concatenate, shape, num_inputs, {name: num_outputs})

  grouped = c.num_kv_heads, -1, c.head_dim
  sizes = [('q', query), ('k', key), ('v', key)][: 1 + c.num_kv_parts]
  matrices = {
    'qkv': joined(
      by_kv_head,
      (c.embed_dim, *grouped),
      c.embed_dim,
      {f'self_attn.{name}_proj': size for name, size in sizes},
    ),
    'attention_out': one(
      'self_attn.o_proj', (*grouped, c.embed_dim), query, c.embed_dim
    ),
  }
  is_llama4 = c.family == llama4.FAMILY
  start = 'feed_forward' if is_llama4 else 'mlp'

  def dense(ffw_dim, part='', own_prefix=''):
    name, embed = f'{start}.{part}', c.embed_dim
    outputs = {f'{name}{x}_proj': ffw_dim for x in ('gate', 'up')}
    shapes = (embed, 2, ffw_dim), (ffw_dim, embed)
    return {
      f'{own_prefix}gate_up': joined(np.concatenate, shapes[0], embed, outputs),
      f'{own_prefix}down': one(f'{name}down_proj', shapes[1], ffw_dim, embed),
    }

  if not c.has_experts(layer):
    return matrices | dense(c.ffw_dim)
  if c.experts.has_shared:
    matrices |= dense(c.expert_ffw_dim, 'shared_expert.', 'shared_')

  router_name = f'{prefix}{start}.{"router" if is_llama4 else "gate"}'
  router = read(router_name, c.embed_dim, c.num_experts)
  if isinstance(router, StoredMatrix):
    raise errors.UserError(
      f'the router {router_name} is quantized, which is not supported; '
      "float8 loads with weight_dtype='wide'"
    )

  def experts(name, num_inputs, num_outputs):
    names = (f'{start}.experts.{i}.{name}' for i in range(c.num_experts))
    outputs = dict.fromkeys(names, num_outputs)
    return joined(np.concatenate, None, num_inputs, outputs)

  return matrices | {
    'router': router.T,
    'experts_gate': experts('gate_proj', c.embed_dim, c.expert_ffw_dim),
    'experts_up': experts('up_proj', c.embed_dim, c.expert_ffw_dim),
    'experts_down': experts('down_proj', c.expert_ffw_dim, c.embed_dim),
  }


def _joined(
  parts: Mapping[str, StoredMatrix | np.ndarray],
  join: Callable[[list[np.ndarray]], np.ndarray],
  shape: tuple[int, ...] | None,
) -> StoredMatrix | np.ndarray:
  """Returns parts as one matrix.

  Args:
    parts: matrices by their names.
    join: function from arrays [1, K, N] to one [P, K, N].
    shape: shape of the result where parts are plain; None is [P, K, N].
  """
  matrices = list(parts.values())
  is_stored = [isinstance(matrix, StoredMatrix) for matrix in matrices]
  if all(is_stored):
    return StoredMatrix.join(join, matrices)
  if any(is_stored):
    raise errors.UserError(
      f'of {", ".join(parts)} only some are quantized, which is not '
      "supported; float8 loads with weight_dtype='wide'"
    )
  joined = join([matrix[None] for matrix in matrices])
  # [P, K, N] -> [K, P, N]
  return joined if shape is None else np.moveaxis(joined, 0, 1).reshape(shape)


def place_as_stored(place: families.Place) -> families.Place:
  """Returns `place` that quantizes nothing that is not quantized already."""

  def as_stored(array, spec):
    is_stored = isinstance(array, StoredMatrix)
    return spec if is_stored else dataclasses.replace(spec, scheme=None)

  return lambda arrays, specs: place(
    arrays, jax.tree.map(as_stored, arrays, specs)
  )
