"""Reads ReDrafter heads as apple/ml-recurrent-drafter saves them.

PyTorch and MLX name the tensors alike. A linear layer is stored [out, in], and
`lm_head` is a list of residual blocks with the unembedding at its end.

Legend: D embed, X width of the blocks, V vocabulary.
"""

import functools
import pathlib

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.models import recurrent
from swiftspec_jax.models.model import Model
from swiftspec_jax.models.params import Params

KIND = 'a ReDrafter head'
_MODEL_TYPE = 'recurrent_drafting_drafter'


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether a directory holds such a head."""
  return hf.values_of(directory).get('model_type') == _MODEL_TYPE


def open_draft(directory: pathlib.Path, target: Model) -> draft_tensors.Draft:
  """Returns a head that fits the target.

  Raises:
    UserError: an entry of the config is missing or no number, or the head
      belongs to another target.
  """
  path = directory / 'config.json'
  values = hf.read_json(path)

  def number(name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 0:
      raise errors.UserError(f'{path}: {name}={value!r} must be a number')
    return value

  width, vocab_size = number('hidden_size'), number('vocab_size')
  known = target.config.embed_dim, target.config.vocab_size
  if width != known[0] or vocab_size > known[1]:
    raise errors.UserError(
      f'{path}: hidden_size={width} and vocab_size={vocab_size} are not those '
      f'of {target.name}, {known[0]} and {known[1]}; load the target that the '
      'head was trained for'
    )
  head = Recurrent(
    num_blocks=number('num_draft_layers'),
    width=number('exit_dim'),
    is_sum=not values.get('rnn', False),
  )
  outputs = None if vocab_size == known[1] else vocab_size
  config = recurrent.config_of(target.config, head, outputs)
  return config, functools.partial(_arrays, directory, target)


def _arrays(
  directory: pathlib.Path, target: Model, config: ModelConfig
) -> Params:
  """Returns host arrays; embedding and final norm are the target's."""
  tensors = draft_tensors.Tensors(directory)
  head, width = config.recurrent, config.embed_dim

  def affine(name: str, outputs: int, inputs: int) -> Params:
    return {
      'weight': tensors.get(f'{name}.weight', outputs, inputs).T,
      'bias': tensors.get(f'{name}.bias', outputs),
    }

  arrays = {
    'embedding': draft_tensors.table_of(target, 'embedding'),
    'layers': [],
    'final_norm': target.params['final_norm'],
    'blocks': [
      affine(f'lm_head.{i}.linear', head.width, head.width)
      for i in range(head.num_blocks)
    ],
    'unembedding': tensors.get(
      f'lm_head.{head.num_blocks}.weight', config.num_logits, head.width
    ),
  }
  if not head.is_sum:
    state = affine('rnn_u', width, width)
    token = tensors.get('rnn_w.weight', width, width).T
    weight = np.concatenate([token, state['weight']])
    arrays['recurrence'] = {**state, 'weight': weight}
  if head.width != 2 * width:
    arrays['head_input'] = affine('input_proj', head.width, 2 * width)
  if config.output_vocab_size:
    arrays['output_token_ids'] = np.arange(config.num_logits, dtype=np.int32)
  tensors.check_all_read(KIND)
  return arrays
