"""Reads DFlash drafts, which propose a block of tokens in one forward.

There are two layouts of the same network (arXiv 2602.06036), a few layers of
Qwen 3. That of its authors has `dflash_config` beside the sizes, and numbers
layers of the target by what comes out of them, as `ModelConfig.feature_layers`
does. The one of `speculators` (vLLM) has the sizes under
`transformer_layer_config` and numbers layers by what goes into them. Neither
has an embedding; an own unembedding exists where it is of few tokens.

Legend: D embed, H features, V vocabulary, V' of it what the draft can propose.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from swiftspec_jax.checkpoint import hf
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Block
from swiftspec_jax.models import families
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params

KIND = 'a DFlash draft'
_KIND = 'speculators_model_type'
_NAME = 'dflash'
# Layers of the target, by what comes out of them and by what goes in.
_OUTPUTS, _INPUTS = 'target_layer_ids', 'aux_hidden_state_layer_ids'
_ARCHITECTURES = ('DFlashDraftModel', 'DFlashSpeculator')
# Entries, and the only value that they may have.
_FIXED = {
  'sample_from_anchor': False,
  'shift_label': False,
  'projector_type': _NAME,
  'input_embedding_scale': 1.0,
  'output_multiplier': 1.0,
  'final_logit_softcapping': 0,
}


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether a directory holds a draft of this kind or of its successors."""
  values = hf.values_of(directory)
  kinds = [values.get(_KIND), *(values.get('architectures') or ())]
  return 'dflash_config' in values or any(
    _NAME in str(kind).lower() for kind in kinds
  )


def _arrays(directory: pathlib.Path, target: Model, c: ModelConfig) -> Params:
  """Returns host arrays; tables are the target's."""
  tensors = draft_tensors.Tensors(directory)
  layers = range(c.num_layers)
  arrays = {
    'embedding': draft_tensors.table_of(target, 'embedding'),
    'layers': [
      families.layer_from_hf(tensors.get, c, 0.0, i, '') for i in layers
    ],
    'final_norm': tensors.norm('norm', c.embed_dim),
    'feature_norm': tensors.norm('hidden_norm', c.embed_dim),
    'feature_projection': tensors.get(
      'fc.weight', c.embed_dim, c.feature_dim
    ).T,
  }
  if c.output_vocab_size is not None:
    shape = c.num_logits, c.embed_dim
    arrays['unembedding'] = tensors.get('lm_head.weight', *shape)
    arrays['output_token_ids'] = draft_tensors.output_token_ids(tensors, c)
  elif not c.tie_embeddings:
    arrays['unembedding'] = draft_tensors.table_of(target, 'unembedding')
  tensors.check_all_read(KIND)
  return arrays


def open_draft(directory: pathlib.Path, target: Model) -> draft_tensors.Draft:
  """Returns a draft that fits the target.

  Raises:
    UserError: an entry of the config is not understood, or the draft belongs to
      another target.
  """
  path = directory / 'config.json'
  values = hf.read_json(path)
  refuse = functools.partial(draft_tensors.refuse, path)
  # Newer files have the entries of the first kind in the second.
  entries = {**values, **(values.get('dflash_config') or {})}
  sizes = _checked(entries, refuse)
  config = hf.config_of(path, sizes)
  _check_target(entries, config, target, refuse)
  layers = _feature_layers(entries, target, refuse)
  size = entries.get('draft_vocab_size') or config.vocab_size
  is_reduced = size != config.vocab_size
  draft = dataclasses.replace(
    config,
    vocab_size=target.config.vocab_size,
    # Drafts go on after the lengths that they were trained for.
    max_context=target.config.max_context,
    eos_token_ids=target.config.eos_token_ids,
    tie_embeddings=target.config.tie_embeddings and not is_reduced,
    output_vocab_size=size if is_reduced else None,
    feature_layers=layers,
    feature_dim=len(layers) * config.embed_dim,
    block=_block(entries, config, refuse),
  )
  return draft, functools.partial(_arrays, directory, target)


def _checked(
  entries: Mapping[str, Any], refuse: Callable[..., NoReturn]
) -> dict[str, Any]:
  """Returns the config of the layers."""
  kind = entries.get(_KIND, _NAME)
  if kind != _NAME:
    refuse(_KIND, kind, f'of these kinds only {_NAME} is known')
  for name in entries.get('architectures') or ():
    if name not in _ARCHITECTURES:
      refuse('architectures', name, f'it must be one of {_ARCHITECTURES}')
  for name, only in _FIXED.items():
    if entries.get(name) not in (None, only):
      refuse(name, entries[name], f'it must be {json.dumps(only)}')
  sizes = entries
  if _KIND in entries:
    sizes = entries.get('transformer_layer_config')
  if not isinstance(sizes, dict):
    refuse('transformer_layer_config', sizes, 'it must be an object')
  if sizes.get('model_type') != 'qwen3':
    refuse('model_type', sizes.get('model_type'), 'the layers are of qwen3')
  return sizes


def _check_target(
  entries: Mapping[str, Any],
  config: ModelConfig,
  target: Model,
  refuse: Callable[..., NoReturn],
) -> None:
  known = target.config
  own = {
    'hidden_size': (config.embed_dim, known.embed_dim),
    'target_hidden_size': (entries.get('target_hidden_size'), known.embed_dim),
    'num_target_layers': (entries.get('num_target_layers'), known.num_layers),
    'vocab_size': (config.vocab_size, known.vocab_size),
  }
  for name, (found, expected) in own.items():
    if found not in (None, expected):
      refuse(name, found, f'that of {target.name} is {expected}')


def _feature_layers(
  entries: Mapping[str, Any], target: Model, refuse: Callable[..., NoReturn]
) -> tuple[int, ...]:
  """Returns the layers of the target whose outputs the draft reads."""
  is_of_inputs = _KIND in entries
  name = _INPUTS if is_of_inputs else _OUTPUTS
  stored = entries.get(name)
  if not stored:
    refuse(
      name,
      stored,
      'which layers of the target a draft reads is settled by its training; '
      'list them there, as its authors say',
    )
  layers = tuple(i - is_of_inputs for i in stored)
  if not all(0 <= layer < target.config.num_layers for layer in layers):
    refuse(name, stored, f'{target.name} has no outputs of layers {layers}')
  return layers


def _block(
  entries: Mapping[str, Any],
  config: ModelConfig,
  refuse: Callable[..., NoReturn],
) -> Block:
  for name in ('block_size', 'mask_token_id'):
    if not isinstance(entries.get(name), int):
      refuse(name, entries.get(name), 'it must be a number')
  is_causal_layer = [config.is_sliding(i) for i in range(config.num_layers)]
  if entries.get('sliding_window_non_causal'):
    is_causal_layer = [False] * config.num_layers
  is_causal = entries.get('is_causal', entries.get('causal'))
  if is_causal is not None:
    is_causal_layer = [bool(is_causal)] * config.num_layers
  if entries['mask_token_id'] >= config.vocab_size:
    reason = f'it must be one of the {config.vocab_size} tokens'
    refuse('mask_token_id', entries['mask_token_id'], reason)
  return Block(
    num_drafts=entries['block_size'] - 1,
    mask_token_id=entries['mask_token_id'],
    causal_layers=tuple(np.flatnonzero(is_causal_layer).tolist()),
  )
