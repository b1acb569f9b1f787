"""The draft in training: its configuration, first parameters, and forward."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import products
from swiftspec_jax import errors
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.distillation import chain_attention
from swiftspec_jax.distillation.samples import Group, Role, Sample
from swiftspec_jax.models import decoder, layers, recurrent
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.matrices import transposed
from swiftspec_jax.models.model import Model

# An answer's token counts as much as this number of tokens of its prompt.
_ANSWER_WEIGHT = 4
_FUSION = 1.0  # first weight of features beside the embedding


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
    feature_layers: layers of the target whose outputs the draft reads
      (EAGLE-3); none for a draft that stands alone.
    recurrent: head in the place of all layers (ReDrafter), which reads the
      output of the last one.
  """

  init_layers: tuple[int, ...] = ()
  num_layers: int | None = None
  embed_dim: int | None = None
  num_heads: int | None = None
  num_kv_heads: int | None = None
  ffw_dim: int | None = None
  output_vocab_size: int | None = None
  feature_layers: tuple[int, ...] = ()
  recurrent: Recurrent | None = None

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
    if target.weight_dtype is not None:
      raise errors.UserError(
        f'the target is quantized to {target.weight_dtype}; load it without '
        'weight_dtype to train a draft (as "wide" if the checkpoint is of few '
        'bits)'
      )
    if target.experts and self.init_layers:
      raise errors.UserError(
        f'init_layers={self.init_layers} would copy '
        f'{target.experts.num_experts} experts of each layer; give num_layers, '
        'which makes a dense draft'
      )
    if target.layer_input_dim and self.init_layers:
      raise errors.UserError(
        f'init_layers={self.init_layers} is not supported for a target whose '
        f'layers get {target.layer_input_dim} inputs of each token; give '
        'num_layers'
      )
    if self.recurrent:
      return self._recurrent_config(target, sizes)
    target.check_layers('init_layers', self.init_layers)
    target.check_layers('feature_layers', self.feature_layers)
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
      irope=None,
      gemma4=target.gemma4 if self.init_layers else None,
      experts=None,
      use_sinks=False,
      output_vocab_size=self.output_vocab_size,
      feature_layers=self.feature_layers,
      feature_dim=len(self.feature_layers) * target.embed_dim,
      num_shards=1,
      **sizes,
    )

  def _recurrent_config(
    self, target: ModelConfig, sizes: Mapping[str, int]
  ) -> ModelConfig:
    if self.init_layers or self.num_layers or sizes:
      raise errors.UserError(
        'a recurrent head has no layers and the width of the target; leave out '
        'init_layers, num_layers and sizes of layers'
      )
    last = (target.num_layers - 1,)
    if self.feature_layers != last:
      raise errors.UserError(
        f'feature_layers={self.feature_layers} must be {last} for a recurrent '
        'head, and the data must hold that layer alone'
      )
    return recurrent.config_of(target, self.recurrent, self.output_vocab_size)


def choose_outputs(
  groups: Sequence[Group], vocab_size: int, size: int
) -> np.ndarray:
  """Returns the token ids that the target expects most, i32[size], ascending.

  What counts is the probability that the stored distributions give a token, so
  that little data suffice. What they lack is filled up from the lowest ids,
  which are the most frequent ones in usual vocabularies.
  """
  counts = np.zeros(vocab_size)
  for group in groups:
    for part in (group, *group.samples):
      weights = np.exp(part.top_log_probs.astype(np.float32))
      if isinstance(part, Sample):
        is_answer = part.roles == Role.ANSWER
        weights *= np.where(is_answer, _ANSWER_WEIGHT, 1)[:, None]
      np.add.at(counts, part.top_token_ids.ravel(), weights.ravel())
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
  embedding, final norm and unembedding. A draft that reads features begins with
  the last of them.
  """
  random = params_lib.random_params(jax.random.key(seed), config)
  arrays = jax.tree.map(np.asarray, transposed.undone(random))
  source = jax.tree.map(
    lambda x: np.asarray(x).astype(
      np.int32 if x.dtype == jnp.int32 else np.float32
    ),
    transposed.undone(target.params),
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
    if arrays['unembedding'].shape[1] == config.embed_dim:
      arrays['unembedding'] = np.array(table[outputs])
    if config.reads_features and not config.recurrent:
      width = config.embed_dim
      projection = np.zeros_like(arrays['feature_projection'])
      projection[-width:] = np.eye(width)
      arrays['feature_projection'] = projection
      arrays['feature_fusion'] = _FUSION * np.eye(width, dtype=np.float32)
  return arrays


def save_layers(
  directory: pathlib.Path, target: Model, init_layers: Sequence[int]
) -> None:
  """Writes a stand-alone draft of some of the target's layers, untrained.

  `swiftspec_jax.load(directory, draft_of=target)` reads it. It is for studies,
  and as large as its layers: without training, a draft of a few of them guesses
  little.

  Args:
    directory: folder to write; made if it does not exist.
    target: model whose layers they are.
    init_layers: indices of the layers, in ascending order.

  Raises:
    UserError: the target has no such layers, or is quantized; or the directory
      cannot be written.
  """
  student = StudentConfig(init_layers=tuple(init_layers))
  config = student.model_config(target.config)
  arrays = initial_params(config, target, student, None, seed=0)
  del arrays['embedding']  # that of the target
  draft_lib.save(directory, config, arrays, target)


def continue_from(
  arrays: params_lib.Params, initial: params_lib.Params
) -> params_lib.Params:
  """Returns the parameters of a draft, for the outputs of a new one.

  Args:
    arrays: host arrays of a draft.
    initial: `initial_params` of a draft that differs in its outputs at most;
      the unembedding of outputs that the other lacks is taken from here.
  """

  def outputs(params):
    every = np.arange(len(params['unembedding']), dtype=np.int32)
    return params.get('output_token_ids', every)

  _, mine, its = np.intersect1d(
    outputs(initial), outputs(arrays), return_indices=True
  )
  unembedding = initial['unembedding'].copy()
  unembedding[mine] = arrays['unembedding'][its]
  learned = {k: v for k, v in arrays.items() if k != 'output_token_ids'}
  return {**initial, **learned, 'unembedding': unembedding}


def forward(
  params: params_lib.Params,
  config: ModelConfig,
  rows: Mapping[str, jax.Array],
  num_passes: int = 1,
) -> list[jax.Array]:
  """Returns logits f32[B, M, V'] at some places of packed rows, for each pass.

  Pass k is that of the k-th token of a chain (training-time test, EAGLE-3,
  section 3.2): the token's own features and those of the k - 2 before it are
  the draft's, all others the target's. So each pass is exactly what the draft
  computes in decoding. A draft that reads no features has one pass.

  Args:
    params: parameters of the draft.
    config: static configuration of the model.
    rows: arrays of `packing.Batch` by name, and, if the draft reads them, the
      target's `features` [B, S, H] at each token.
    num_passes: static number of passes.
  """
  features = None
  if config.reads_features:
    features = decoder.project_features(params, config, rows['features'])
  passes, logits = [], []
  for _ in range(num_passes):
    attend, written = chain_attention.make_attend_fn(config, rows, passes)
    if config.reads_features:
      features = chain_attention.take_previous(features, rows['previous'])
    features, _ = decoder.run_layers(
      params,
      config,
      rows['token_ids'],
      rows['positions'],
      attend,
      features_before=features,
    )
    passes.append(written)
    hidden = jnp.take_along_axis(features, rows['places'][:, :, None], axis=1)
    x = decoder.before_unembedding(params, config, hidden)
    scores = products.wide_einsum('bmd,vd->bmv', x, params['unembedding'])
    logits.append(layers.cap(scores, config.logit_cap))
  return logits


def top_outputs(
  top_token_ids: np.ndarray, outputs: np.ndarray | None
) -> np.ndarray:
  """Maps token ids to outputs of the draft, -1 where there is none.

  Args:
    top_token_ids: i32[...].
    outputs: i32[V'] ascending token ids; None means all.
  """
  if outputs is None:
    return top_token_ids
  places = np.searchsorted(outputs, top_token_ids)
  places = np.minimum(places, len(outputs) - 1)
  return np.where(outputs[places] == top_token_ids, places, -1).astype(np.int32)
