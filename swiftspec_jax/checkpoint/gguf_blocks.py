"""The matrices of a layer in the blocks of a GGUF file."""

from collections.abc import Callable, Mapping

import numpy as np

from swiftspec_jax.checkpoint import gguf_header
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models.matrices.stored_blocks import StoredBlocks
from swiftspec_jax.models.params import Params

# From name and shape [out, in] to a tensor, and the places in it of its outputs
# in the order of Hugging Face.
Get = Callable[[str, int, int], tuple[gguf_header.Tensor, np.ndarray]]


def read_layer(
  config: ModelConfig, get: Get, prefix: str, layer: int
) -> Params:
  """Returns the matrices of a layer; see `param_specs`.

  Args:
    config: the model's.
    get: function that returns a tensor of the file.
    prefix: start of the names of the layer.
    layer: number of the layer.
  """
  c = config.of_layer(layer)
  query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

  def joined(num_inputs: int, outputs: Mapping[str, int]):
    found = [
      get(f'{prefix}{name}.weight', num_outputs, num_inputs)
      for name, num_outputs in outputs.items()
    ]
    return zip(*found, strict=True)

  def one(name: str, num_outputs: int, num_inputs: int) -> StoredBlocks:
    tensors, _ = joined(num_inputs, {name: num_outputs})
    return StoredBlocks(tensors, num_inputs, (num_outputs,))

  names = {f'self_attn.{x}_proj': key for x in 'qkv'}
  names['self_attn.q_proj'] = query
  heads, (queries, keys, values) = joined(c.embed_dim, names)
  grouped = [
    places.reshape(c.num_kv_heads, -1, c.head_dim)
    for places in (queries, query + keys, query + key + values)
  ]
  order = np.concatenate(grouped, axis=1)
  gate_up, _ = joined(
    c.embed_dim, {f'mlp.{x}_proj': c.ffw_dim for x in ('gate', 'up')}
  )
  return {
    'qkv': StoredBlocks(heads, c.embed_dim, order.shape, order.ravel()),
    'attention_out': one('self_attn.o_proj', c.embed_dim, query),
    'gate_up': StoredBlocks(gate_up, c.embed_dim, (2, c.ffw_dim)),
    'down': one('mlp.down_proj', c.embed_dim, c.ffw_dim),
  }
