"""Reads the layer for multi-token prediction in a checkpoint of its target.

Such a layer was trained with the target to predict one more token (DeepSeek-V3,
section 2.2). That of MiMo is a layer of Qwen 2, over a projection of two normed
vectors side by side: what the target gives for a token, after its final norm,
and the embedding of the next token. Embedding and unembedding are the target's.

Legend: D embed.
"""

import dataclasses
import functools
import pathlib

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params

KIND = 'a layer for multi-token prediction'
_NUM_LAYERS = 'num_nextn_predict_layers'
_START = 'model.mtp_'


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether a directory holds a target with such a layer, which is to draft."""
  values = hf.values_of(directory)
  is_mimo = values.get('model_type') == families.MIMO
  return target is not None and is_mimo and bool(values.get(_NUM_LAYERS))


def open_draft(directory: pathlib.Path, target: Model) -> draft_tensors.Draft:
  """Returns the layer of a target.

  Raises:
    UserError: an entry of the config is not understood, or the layer belongs to
      another target.
  """
  path = directory / 'config.json'
  values = hf.read_json(path)
  refuse = functools.partial(draft_tensors.refuse, path)
  if values[_NUM_LAYERS] != 1:
    refuse(_NUM_LAYERS, values[_NUM_LAYERS], 'one layer is known')
  config = hf.config_of(path, values)
  found = target.config
  for name in ('num_layers', 'embed_dim', 'vocab_size'):
    if getattr(found, name) != getattr(config, name):
      raise errors.UserError(
        f'{directory} has {name}={getattr(config, name)}, and {target.name} '
        f'{getattr(found, name)}; its layer drafts for its own target'
      )
  layer = dataclasses.replace(
    config,
    num_layers=1,
    sliding_window=None,
    sliding_layers=(),
    eos_token_ids=found.eos_token_ids,
    tie_embeddings=False,
    is_mtp=True,
    feature_layers=(config.num_layers - 1,),
    feature_dim=config.embed_dim,
  )
  return layer, functools.partial(_arrays, directory, target)


def _arrays(
  directory: pathlib.Path, target: Model, config: ModelConfig
) -> Params:
  """Returns host arrays; tables are the target's."""
  tensors, width = draft_tensors.Tensors(directory), config.embed_dim

  def norm(name: str) -> np.ndarray:
    return tensors.norm(f'{_START}layers.0.{name}_layernorm', width)

  name = f'{_START}layers.0.input_proj.weight'  # [D, 2 D]
  of_feature, of_token = np.split(tensors.get(name, width, 2 * width), 2, 1)
  is_tied = 'unembedding' not in target.params
  unembedding = 'embedding' if is_tied else 'unembedding'
  arrays = {
    'embedding': draft_tensors.table_of(target, 'embedding'),
    'unembedding': draft_tensors.table_of(target, unembedding),
    'target_feature_norm': target.params['final_norm'],
    'layers': [families.layer_from_hf(tensors.get, config, 0.0, 0, _START)],
    'final_norm': norm('final'),
    'feature_norm': norm('hidden'),
    'feature_fusion': of_feature.T,
    'token_norm': norm('token'),
    'token_fusion': of_token.T,
  }
  tensors.check_all_read(KIND, start=_START)
  return arrays
