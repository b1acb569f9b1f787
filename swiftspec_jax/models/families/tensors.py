"""How the named tensors of a family become the parameter tree."""

import concurrent.futures
from collections.abc import Callable, Mapping

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import array_parts
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.array_parts import Joined
from swiftspec_jax.models.families import gemma4, llama4
from swiftspec_jax.models.matrices.stored_blocks import StoredBlocks
from swiftspec_jax.models.matrices.stored_matrix import StoredMatrix
from swiftspec_jax.models.params import Params

# Puts a part of the parameters, described by the specs, on the devices.
Place = Callable[[Params, Params], Params]
# From a name without `.weight` and [outputs, inputs] to a matrix with outputs
# first.
Read = Callable[[str, int, int], np.ndarray | StoredMatrix | StoredBlocks]

_NUM_THREADS = 8  # that read layers; each holds one in memory


def params_from_hf(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  place: Place,
  read: Read | None = None,
) -> Params:
  """Assembles the parameter tree from tensors with Hugging Face names.

  Args:
    get: function from name and shape to the tensor, which raises UserError if
      there is none. It is called from several threads.
    config: sizes of the model.
    norm_offset: number added to norm scales (1 where the checkpoint stores
      them relative to one, as Gemma's do).
    place: function that puts a part of the tree on the devices, as soon as it
      is read.
    read: function as in `layer_from_hf`.

  Returns:
    What `place` makes of the tree of `param_specs(config)`.
  """
  c = config
  specs = params_lib.param_specs(c)
  names = {'embedding': 'model.embed_tokens.weight'}
  if not c.tie_embeddings:
    names['unembedding'] = 'lm_head.weight'
  final_norm = get('model.norm.weight', c.embed_dim)
  final_norm = final_norm.astype(np.float32) + norm_offset

  def table(key: str) -> Params:
    return place(get(names[key], c.vocab_size, c.embed_dim), specs[key])

  def layer(i: int) -> Params:
    arrays = layer_from_hf(get, c, norm_offset, i, 'model.', read=read)
    return place(arrays, specs['layers'][i])

  with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    # The largest first.
    tables = pool.map(table, names)
    layers = pool.map(layer, range(c.num_layers))
    params = {
      **dict(zip(names, tables, strict=True)),
      'layers': list(layers),
      'final_norm': place(final_norm, specs['final_norm']),
    }
  if c.layer_input_dim:
    tables = gemma4.tables(get, c)
    params |= place(tables, {name: specs[name] for name in tables})
  return params


def get_checked(
  get: Callable[[str], np.ndarray], name: str, *shape: int
) -> np.ndarray:
  """Returns `get(name)`; raises UserError if it has another shape."""
  array = get(name)
  array_parts.check_shape(f'tensor {name}', array.shape, shape)
  return array


def layer_from_hf(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  layer: int,
  start: str,
  attention_width: int | None = None,
  read: Read | None = None,
) -> Params:
  """Returns the unpadded arrays of one layer, in views of its tensors.

  Args:
    get: function from name and shape to the tensor.
    config: the model's.
    norm_offset: number as in `params_from_hf`.
    layer: number of the layer.
    start: beginning of all names.
    attention_width: inputs of queries, keys and values; None is D.
    read: function that returns a matrix of the layer, where they are stored in
      another way than as tensors of weights.

  Raises:
    UserError: only some parts of a matrix are quantized, or a router is.
  """
  c, prefix = config.of_layer(layer), f'{start}layers.{layer}.'
  attention_width = attention_width or c.embed_dim
  num_heads = [('q', c.num_heads), ('k', c.num_kv_heads), ('v', c.num_kv_heads)]
  sizes = {
    f'self_attn.{name}_proj': count * c.head_dim
    for name, count in num_heads[: 1 + c.num_kv_parts]
  }
  # Sorted by the kv head that they belong to.
  grouped = (c.num_kv_heads, -1, c.head_dim)

  def heads(arrays):
    return _as_rotated([x.reshape(*grouped, *x.shape[1:]) for x in arrays], c)

  def matrix(name, num_out, num_in):
    if read:
      return read(prefix + name, num_out, num_in)
    return get(f'{prefix}{name}.weight', num_out, num_in)

  out = matrix('self_attn.o_proj', c.embed_dim, c.num_heads * c.head_dim)
  qkv = {name: matrix(name, n, attention_width) for name, n in sizes.items()}
  arrays = {
    # [G, Q + 2, E, D] -> [D, G, Q + 2, E]
    'qkv': _joined(qkv, heads, 1, (3, 0, 1, 2)),
    # [D, heads * E] -> [G, Q, E, D]
    'attention_out': _by_inputs(out, *grouped),
    **_feed_forward(get, matrix, c, layer, prefix, read is not None),
  }
  if c.use_output_bias:
    name = f'{prefix}self_attn.o_proj.bias'
    arrays['attention_out_bias'] = get(name, c.embed_dim)
  if c.use_sinks:
    sinks = get(f'{prefix}self_attn.sinks', c.num_heads)
    arrays['sinks'] = sinks.reshape(c.num_kv_heads, -1)
  if c.use_qkv_bias:
    biases = [get(f'{prefix}{name}.bias', n) for name, n in sizes.items()]
    arrays['qkv_bias'] = np.concatenate(heads(biases), axis=1)
  return arrays | _scales(get, c, norm_offset, prefix)


def _scales(
  get: Callable[..., np.ndarray],
  config: ModelConfig,
  norm_offset: float,
  prefix: str,
) -> Params:
  """Returns the scales of the norms of a layer, and of its output."""
  c = config

  def norm(name, size=c.embed_dim):
    array = get(f'{prefix}{name}.weight', size)
    return array.astype(np.float32) + norm_offset

  arrays = {'attention_norm': norm('input_layernorm')}
  if c.use_qk_norm:
    arrays['query_norm'] = norm('self_attn.q_norm', c.head_dim)
  if c.use_qk_norm and c.num_kv_parts:
    arrays['key_norm'] = norm('self_attn.k_norm', c.head_dim)
  if c.use_post_norms:
    arrays['post_attention_norm'] = norm('post_attention_layernorm')
    arrays['ffw_norm'] = norm('pre_feedforward_layernorm')
    arrays['post_ffw_norm'] = norm('post_feedforward_layernorm')
  else:
    arrays['ffw_norm'] = norm('post_attention_layernorm')
  return arrays | gemma4.extras(get, c, prefix) if c.gemma4 else arrays


def _as_rotated(
  heads: list[np.ndarray], config: ModelConfig
) -> list[np.ndarray]:
  """Returns q, k and v [G, Q, E, ...] with E in the order of rotations."""
  if config.family != llama4.FAMILY:
    return heads
  return [*(llama4.rotated_halves(x, 2) for x in heads[:2]), heads[2]]


def _joined(
  parts: Mapping[str, np.ndarray | StoredMatrix | StoredBlocks],
  split: Callable[[list[np.ndarray]], list[np.ndarray]],
  axis: int,
  order: tuple[int, ...],
) -> Joined | StoredMatrix | StoredBlocks:
  """Returns matrices of the same inputs as one.

  Args:
    parts: matrices with outputs first, by their names.
    split: function that gives each the axes of its outputs.
    axis: axis along which they then lie one after another.
    order: axes of the result, as numbers of those.

  Raises:
    UserError: only some are quantized.
  """
  matrices = list(parts.values())
  if all(isinstance(matrix, np.ndarray) for matrix in matrices):
    return Joined(split(matrices), axis, order)
  if all(isinstance(matrix, StoredBlocks) for matrix in matrices):
    return StoredBlocks.join(
      lambda places: np.concatenate(split(places), axis), matrices
    )
  if all(isinstance(matrix, StoredMatrix) for matrix in matrices):
    return StoredMatrix.join(
      lambda arrays: np.asarray(Joined(split(arrays), axis, order)), matrices
    )
  raise errors.UserError(
    f'of {", ".join(parts)} only some are quantized, which is not '
    "supported; float8 loads with weight_dtype='wide'"
  )


def _parts(arrays: list[np.ndarray]) -> list[np.ndarray]:
  """Returns arrays with an axis before the others, for `_joined`."""
  return [array[None] for array in arrays]


def _by_inputs(
  matrix: np.ndarray | StoredMatrix | StoredBlocks, *inputs: int
) -> np.ndarray | StoredMatrix | StoredBlocks:
  """Returns a matrix [N, K] as [K, N], an array as [*inputs, N]."""
  if isinstance(matrix, np.ndarray):
    return matrix.T.reshape(*inputs, len(matrix))
  return _joined({'': matrix}, list, 0, (1, 0))


def _feed_forward(
  get: Callable[..., np.ndarray],
  read: Read,
  config: ModelConfig,
  layer: int,
  prefix: str,
  is_stored: bool,
) -> Params:
  """Returns the matrices after the attention; see `param_specs`.

  Args:
    get: function as in `layer_from_hf`.
    read: function from the name in the layer, without `.weight`, and the sizes
      of a matrix to the matrix.
    config: the layer's.
    layer: number of the layer.
    prefix: beginning of the names of the layer.
    is_stored: whether matrices are stored in another way than as weights.
  """
  c, is_llama4 = config, config.family == llama4.FAMILY
  start = 'feed_forward' if is_llama4 else 'mlp'

  def dense(ffw_dim, part='', own_prefix=''):
    names = [f'{start}.{part}{x}_proj' for x in ('gate', 'up')]
    gate_up = {name: read(name, ffw_dim, c.embed_dim) for name in names}
    down = read(f'{start}.{part}down_proj', c.embed_dim, ffw_dim)
    return {
      # [2, F, D] -> [D, 2, F]
      f'{own_prefix}gate_up': _joined(gate_up, _parts, 0, (2, 0, 1)),
      f'{own_prefix}down': _by_inputs(down, ffw_dim),
    }

  if not c.has_experts(layer):
    return dense(c.ffw_dim)
  if c.experts.is_beside_dense:
    joint = _joint_experts(get, c, prefix, f'{prefix}router.proj')
    return dense(c.ffw_dim) | joint
  at = f'{prefix}{start}.'
  if c.family == 'gpt_oss':
    return _joint_experts(get, c, at, f'{at}router')
  shared = {}
  if c.experts.has_shared:
    shared = dense(c.expert_ffw_dim, 'shared_expert.', 'shared_')
  if is_llama4 and not is_stored:
    return _joint_experts(get, c, at, f'{at}router') | shared
  router_name = f'{start}.{"router" if is_llama4 else "gate"}'
  router = read(router_name, c.num_experts, c.embed_dim)
  if isinstance(router, StoredMatrix):
    raise errors.UserError(
      f'the router {prefix}{router_name} is quantized, which is not supported; '
      "float8 loads with weight_dtype='wide'"
    )

  def stacked(name, num_out, num_in):
    names = [f'{start}.experts.{i}.{name}' for i in range(c.num_experts)]
    matrices = {name: read(name, num_out, num_in) for name in names}
    return _joined(matrices, _parts, 0, (0, 2, 1))

  return shared | {
    'router': router,
    'experts_gate': stacked('gate_proj', c.expert_ffw_dim, c.embed_dim),
    'experts_up': stacked('up_proj', c.expert_ffw_dim, c.embed_dim),
    'experts_down': stacked('down_proj', c.embed_dim, c.expert_ffw_dim),
  }


def _joint_experts(
  get: Callable[..., np.ndarray], config: ModelConfig, prefix: str, router: str
) -> Params:
  """Returns the experts of a layer that lie in joint tensors.

  `prefix` begins the names of their tensors, `router` those of the router.
  """
  num, ffw = config.num_experts, config.expert_ffw_dim
  embed = config.embed_dim
  gate_up, down = (f'{prefix}experts.{x}_proj' for x in ('gate_up', 'down'))
  if config.gemma4:
    both = np.swapaxes(get(gate_up, num, 2 * ffw, embed), 1, 2)
    downs = np.swapaxes(get(down, num, embed, ffw), 1, 2)
  else:
    both = get(gate_up, num, embed, 2 * ffw)
    downs = get(down, num, ffw, embed)
  gates, ups = slice(ffw), slice(ffw, None)
  if config.experts.use_bias:
    gates, ups = slice(None, None, 2), slice(1, None, 2)  # they take turns
  arrays = {
    'router': get(f'{router}.weight', num, embed),
    'experts_gate': both[..., gates],
    'experts_up': both[..., ups],
    'experts_down': downs,
  }
  if config.experts.use_bias:
    biases = get(f'{gate_up}_bias', num, 2 * ffw)
    arrays |= {
      'router_bias': get(f'{router}.bias', num),
      'experts_gate_bias': biases[..., gates],
      'experts_up_bias': biases[..., ups],
      'experts_down_bias': get(f'{down}_bias', num, embed),
    }
  return arrays
