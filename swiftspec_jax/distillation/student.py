"""The draft in training: its configuration, first parameters, and forward."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tree_attention import reference
from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.distillation.samples import Group, Role, Sample
from swiftspec_jax.model import Model
from swiftspec_jax.models import decoder, layers
from swiftspec_jax.models import params as params_lib

# An answer's token counts as much as so many of its prompt.
_ANSWER_WEIGHT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentConfig:
  """Architecture of a draft; what is None is that of the target.

  Attributes:
    init_layers: layers of the target that the draft's begin as; their number
      is that of the draft's layers.
    num_layers: without `init_layers`, randomly initialised.
    embed_dim: another width than the target's means an embedding of its own.
    num_heads: query heads.
    num_kv_heads: key and value heads.
    ffw_dim: width between gate and down.
    output_vocab_size: tokens that the draft can propose; None means all.
  """

  init_layers: tuple[int, ...] = ()
  num_layers: int | None = None
  embed_dim: int | None = None
  num_heads: int | None = None
  num_kv_heads: int | None = None
  ffw_dim: int | None = None
  output_vocab_size: int | None = None

  def model_config(self, target: ModelConfig) -> ModelConfig:
    """Returns the draft's configuration.

    Raises:
      UserError: it does not fit the target.
    """
    sizes = {
      name: getattr(self, name)
      for name in ('embed_dim', 'num_heads', 'num_kv_heads', 'ffw_dim')
      if getattr(self, name) is not None
    }
    target.check_layers('init_layers', self.init_layers)
    if self.init_layers and sizes:
      raise errors.UserError(
        f'init_layers={self.init_layers} needs the sizes of the target; leave '
        f'out {", ".join(sizes)}'
      )
    if self.init_layers and self.num_layers not in (
      None,
      len(self.init_layers),
    ):
      raise errors.UserError(
        f'num_layers={self.num_layers} contradicts the {len(self.init_layers)} '
        'init_layers; give one of them'
      )
    num_layers = len(self.init_layers) or self.num_layers
    if not num_layers:
      raise errors.UserError('give init_layers or num_layers of the draft')
    sliding = tuple(target.is_sliding(i) for i in self.init_layers)
    return dataclasses.replace(
      target,
      num_layers=num_layers,
      sliding_layers=sliding if target.sliding_layers else (),
      sliding_window=target.sliding_window if any(sliding) else None,
      tie_embeddings=False,
      output_vocab_size=self.output_vocab_size,
      num_shards=1,
      **sizes,
    )


def choose_outputs(
  groups: Sequence[Group], vocab_size: int, size: int
) -> np.ndarray:
  """Returns the token ids that the target expects most, i32[size], ascending.

  What counts is the probability that the stored laws give a token, so that
  little data suffice. What they lack is filled up from the lowest ids, which
  are the most frequent ones in usual vocabularies.
  """
  counts = np.zeros(vocab_size)
  for group in groups:
    for part in (group, *group.samples):
      weights = np.exp(part.law_log_probs.astype(np.float32))
      if isinstance(part, Sample):
        is_answer = part.roles == Role.ANSWER
        weights *= np.where(is_answer, _ANSWER_WEIGHT, 1)[:, None]
      np.add.at(counts, part.law_ids.ravel(), weights.ravel())
  order = np.lexsort((np.arange(vocab_size), -counts))
  return np.sort(order[:size]).astype(np.int32)


def initial_params(
  config: ModelConfig,
  target: Model,
  student: StudentConfig,
  output_token_ids: np.ndarray | None,
  seed: int,
) -> params_lib.Params:
  """Returns host arrays f32 of all parameters of the draft.

  Layers are the target's where `init_layers` says so; of equal width are also
  embedding, final norm and unembedding.
  """
  arrays = jax.tree.map(
    np.asarray, params_lib.random_params(jax.random.key(seed), config)
  )
  source = jax.tree.map(
    lambda x: np.asarray(x).astype(
      np.int32 if x.dtype == jnp.int32 else np.float32
    ),
    target.params,
  )
  for i, layer in enumerate(student.init_layers):
    arrays['layers'][i] = source['layers'][layer]
  if output_token_ids is not None:
    arrays['output_token_ids'] = output_token_ids
  if config.embed_dim == target.config.embed_dim:
    arrays['embedding'] = source['embedding']
    arrays['final_norm'] = source['final_norm']
    table = source.get('unembedding', source['embedding'])
    outputs = slice(None) if output_token_ids is None else output_token_ids
    arrays['unembedding'] = np.array(table[outputs])
  return arrays


def forward(
  params: params_lib.Params,
  config: ModelConfig,
  token_ids: jax.Array,
  positions: jax.Array,
  pieces: jax.Array,
  branches: jax.Array,
  places: jax.Array,
) -> jax.Array:
  """Returns logits f32[B, M, V'] at some places of packed rows.

  Args:
    params: of the draft.
    config: static.
    token_ids: i32[B, S].
    positions: i32[B, S].
    pieces: i32[B, S]; tokens see only their own piece,
    branches: i32[B, S] and there only the prefix (0) and their own branch.
    places: i32[B, M].
  """
  size = token_ids.shape[1]
  order = jnp.arange(size)
  visible = (
    (order[None, :, None] >= order[None, None])
    & (pieces[:, :, None] == pieces[:, None])
    & ((branches[:, None] == 0) | (branches[:, :, None] == branches[:, None]))
  )
  near = visible
  if config.sliding_window is not None:
    distance = positions[:, :, None] - positions[:, None]
    near = visible & (distance < config.sliding_window)

  def attend(i, queries, keys, values):
    return reference.masked_attention(
      queries,
      jnp.moveaxis(keys, 1, 2),
      jnp.moveaxis(values, 1, 2),
      near if config.is_sliding(i) else visible,
      decoder.query_scale(config),
    )

  hidden, _ = decoder.run_layers(params, config, token_ids, positions, attend)
  hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
  x = layers.rms_norm(hidden, params['final_norm'], config.norm_eps)
  return jnp.einsum(
    'bmd,vd->bmv', x, params['unembedding'], preferred_element_type=jnp.float32
  )


def law_outputs(law_ids: np.ndarray, outputs: np.ndarray | None) -> np.ndarray:
  """Maps token ids to outputs of the draft, -1 where there is none.

  Args:
    law_ids: i32[...].
    outputs: i32[V'] ascending token ids; None means all.
  """
  if outputs is None:
    return law_ids
  places = np.searchsorted(outputs, law_ids)
  places = np.minimum(places, len(outputs) - 1)
  return np.where(outputs[places] == law_ids, places, -1).astype(np.int32)
