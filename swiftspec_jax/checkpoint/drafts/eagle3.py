"""Reads EAGLE-3 heads as others publish them.

There are three layouts of the same network. SafeAILab's and SGLang's name the
first layer `midlayer` and have its sizes in `config.json` itself. AngelSlim,
SpecForge and NVIDIA publish in that of SGLang. The layout of `speculators`
(vLLM) names the layer `layers.0` and has its sizes under
`transformer_layer_config`.

Numbers of layers differ by one: the default (2, L // 2, L - 3) and those of
`speculators` count what goes into a layer, those under `eagle_config` what
comes out of it, as `ModelConfig.feature_layers` does.

Legend: D embed, H features, V vocabulary, V' of it what the draft can propose.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Block, Eagle3
from swiftspec_jax.models import families
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params

KIND = 'an EAGLE-3 head'
_KIND = 'speculators_model_type'
_PARALLEL = 'peagle'
_LAYERS = 'eagle_aux_hidden_state_layer_ids'
_SWITCHES = tuple(field.name for field in dataclasses.fields(Eagle3))
# Entries, and the only value that they may have.
_FIXED = {
  'use_aux_hidden_state': True,
  'use_input_layernorm_in_first_layer': True,
  'use_last_layernorm': True,
  'use_mtp_layernorm': False,
  'parallel_draft_step': 1,
}
_FAMILIES = ('llama', 'qwen3')
# Tokens that P-EAGLE heads draft if it is not said.
_NUM_DRAFTS = 8
_EMBEDDING = 'embed_tokens.weight'


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether a directory holds a draft of others' making."""
  values = hf.values_of(directory)
  return (
    _KIND in values
    or 'draft_vocab_size' in values
    or any('Eagle' in str(name) for name in values.get('architectures') or ())
  )


def open_draft(directory: pathlib.Path, target: Model) -> draft_tensors.Draft:
  """Returns a head that fits the target.

  Raises:
    UserError: an entry of the config is not understood, or the head belongs to
      another target.
  """
  path = directory / 'config.json'
  values = hf.read_json(path)
  refuse = functools.partial(draft_tensors.refuse, path)
  eagle3, sizes = _checked(values, refuse)
  config = hf.config_of(path, sizes)
  features = _features_of(values, config, target, refuse)
  if config.vocab_size > target.config.vocab_size:
    known = f'that of {target.name} is {target.config.vocab_size}'
    refuse('vocab_size', config.vocab_size, known)
  head = dataclasses.replace(
    config,
    vocab_size=target.config.vocab_size,
    # Heads go on after the lengths that they were trained for.
    max_context=target.config.max_context,
    eos_token_ids=target.config.eos_token_ids,
    tie_embeddings=False,
    output_vocab_size=values.get('draft_vocab_size') or config.vocab_size,
    eagle3=eagle3,
    block=_block(values, config, refuse),
    **features,
  )
  return head, functools.partial(_arrays, directory, target, config.vocab_size)


def _checked(
  values: Mapping[str, Any], refuse: Callable[..., NoReturn]
) -> tuple[Eagle3, dict[str, Any]]:
  """Returns the switches of a head, and the config of its layers."""
  kind = values.get(_KIND, 'eagle3')
  if kind not in ('eagle3', _PARALLEL):
    refuse(_KIND, kind, f'eagle3, {_PARALLEL} and dflash are known')
  entries = {**values, **(values.get('eagle_config') or {})}
  for name, only in _FIXED.items():
    if entries.get(name) not in (None, only):
      refuse(name, entries[name], f'it must be {json.dumps(only)}')
  # Elsewhere `norm_output` says that there is a norm before the unembedding.
  switches = _SWITCHES if _KIND in values else _SWITCHES[:-1]
  eagle3 = Eagle3(**{name: bool(values.get(name)) for name in switches})
  sizes = values.get('transformer_layer_config') if _KIND in values else values
  if not isinstance(sizes, dict):
    refuse('transformer_layer_config', sizes, 'it must be an object')
  family = sizes.get('model_type')
  if family not in _FAMILIES:
    refuse('model_type', family, f'heads have layers of {_FAMILIES}')
  kinds = sizes.get('layer_types') or ()
  is_llama = family == 'llama'  # others have a switch for their windows
  if 'sliding_attention' in kinds or (is_llama and sizes.get('sliding_window')):
    refuse('sliding_window', sizes.get('sliding_window'), 'leave it out')
  return eagle3, sizes


def _block(
  values: Mapping[str, Any],
  config: ModelConfig,
  refuse: Callable[..., NoReturn],
) -> Block | None:
  """Returns how a P-EAGLE head drafts; None for others."""
  if values.get(_KIND) != _PARALLEL:
    return None
  mask, size = values.get('mask_token_id'), config.vocab_size
  if not isinstance(mask, int) or not 0 <= mask < size:
    refuse('mask_token_id', mask, f'it must be one of the {size} tokens')
  methods = (values.get('speculators_config') or {}).get('proposal_methods')
  num_drafts = methods[0].get('speculative_tokens') if methods else None
  return Block(num_drafts=num_drafts or _NUM_DRAFTS, mask_token_id=mask)


def _features_of(
  values: Mapping[str, Any],
  config: ModelConfig,
  target: Model,
  refuse: Callable[..., NoReturn],
) -> dict[str, Any]:
  """Returns the fields of `ModelConfig` that say what a head reads."""
  width, num_layers = target.config.embed_dim, target.config.num_layers
  # In one layout the head is as wide as its target if that is not said.
  default = config.embed_dim if _KIND in values else width
  found = values.get('target_hidden_size') or default
  if found != width:
    refuse('target_hidden_size', found, f'{target.name} is {width} wide')
  layers = (values.get('eagle_config') or {}).get(_LAYERS)
  if not layers:
    default = 2, num_layers // 2, num_layers - 3
    layers = [layer - 1 for layer in values.get(_LAYERS) or default]
  if not all(0 <= layer < num_layers for layer in layers):
    reason = f'{target.name} has no outputs of layers {layers}'
    refuse(_LAYERS, values.get(_LAYERS), reason)
  return {
    'feature_layers': tuple(layers),
    'feature_dim': len(layers) * width,
  }


def _arrays(
  directory: pathlib.Path, target: Model, num_embeddings: int, c: ModelConfig
) -> Params:
  """Returns host arrays; an embedding of its own has `num_embeddings` rows."""
  tensors = draft_tensors.Tensors(directory)
  if _EMBEDDING in tensors:
    table = tensors.get(_EMBEDDING, num_embeddings, c.embed_dim)
    table = np.pad(table, ((0, c.vocab_size - len(table)), (0, 0)))
  else:
    table = draft_tensors.table_of(target, 'embedding')
    if table.shape[1] != c.embed_dim:
      raise errors.UserError(
        f'{directory} has no {_EMBEDDING}, and that of {target.name} is '
        f'{table.shape[1]} wide, not {c.embed_dim}; load the target that the '
        'head was trained for'
      )
  # The first layer attends with a pair.
  widths = [c.embed_dim * (1 if i else 2) for i in range(c.num_layers)]
  arrays = {
    'embedding': table,
    'layers': [
      families.layer_from_hf(tensors.get, c, 0.0, i, '', attention_width=width)
      for i, width in enumerate(widths)
    ],
    'final_norm': tensors.norm('norm', c.embed_dim),
    'feature_norm': tensors.norm('layers.0.hidden_norm', c.embed_dim),
    'feature_projection': tensors.get(
      'fc.weight', c.embed_dim, c.feature_dim
    ).T,
    'unembedding': tensors.get('lm_head.weight', c.num_logits, c.embed_dim),
    'output_token_ids': draft_tensors.output_token_ids(tensors, c),
  }
  if c.eagle3.norm_before_fc:
    arrays['target_feature_norm'] = tensors.norm('input_norm', c.feature_dim)
  if c.eagle3.fc_norm:
    num_layers = len(c.feature_layers)
    width = c.feature_dim // num_layers
    arrays['target_feature_norm'] = np.concatenate(
      [tensors.norm(f'fc_norm.{i}', width) for i in range(num_layers)]
    )
  if c.block:
    mask = tensors.get('mask_hidden', 1, 1, c.feature_dim)
    arrays['mask_feature'] = mask.reshape(-1)
  tensors.check_all_read(KIND)
  return arrays
