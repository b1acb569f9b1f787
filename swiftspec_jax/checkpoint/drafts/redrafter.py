"""Reads ReDrafter heads as apple/ml-recurrent-drafter saves them.

PyTorch and MLX name the tensors alike. A linear layer is stored [out, in], and
`lm_head` is a list of residual blocks with the unembedding at its end.

Legend: D embed, X width of the blocks, V vocabulary.
"""

import dataclasses
import pathlib

import numpy as np

from swiftspec_jax import errors
from swiftspec_jax.checkpoint import hf
from swiftspec_jax.checkpoint.drafts import draft_tensors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.config.architecture import Recurrent
from swiftspec_jax.model import Model
from swiftspec_jax.models import families, recurrent
from swiftspec_jax.models import params as params_lib

_MODEL_TYPE = 'recurrent_drafting_drafter'
# Stored by some, and used by nobody.
_IGNORED = ('emb_norm.weight',)


def matches(directory: pathlib.Path, target: Model | None) -> bool:
  """Whether a directory holds such a head."""
  return hf.values_of(directory).get('model_type') == _MODEL_TYPE


@dataclasses.dataclass(frozen=True)
class Head:
  """A head whose weights are not read yet."""

  directory: pathlib.Path
  config: ModelConfig
  target: Model

  def read_params(
    self, config: ModelConfig, place: families.Place
  ) -> params_lib.Params:
    """Returns the parameters as `place` puts them.

    Raises:
      UserError: missing, cut, unknown or contradicting weights.
    """
    tensors = _Tensors(self.directory)
    arrays = _arrays(tensors, config)
    unknown = tensors.unread - set(_IGNORED)
    if unknown:
      raise errors.UserError(
        f'{self.directory}: tensor {min(unknown)} is not of the head that '
        'config.json describes'
      )
    arrays['embedding'] = draft_tensors.table_of(self.target, 'embedding')
    arrays['final_norm'] = self.target.params['final_norm']
    return place(arrays, params_lib.param_specs(config))


def open_draft(directory: pathlib.Path, target: Model | None) -> Head:
  """Returns a head that fits the target.

  Raises:
    UserError: no target is given, an entry of the config is missing or no
      number, or the head belongs to another target.
  """
  if target is None:
    raise errors.UserError(
      f'{directory} is a ReDrafter head and cannot be loaded alone; load it '
      'with draft_of=target'
    )
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
  return Head(directory, config, target)


class _Tensors:
  """The tensors of a directory, and which of them nobody has read."""

  def __init__(self, directory: pathlib.Path):
    self._get, names = hf.open_tensors(directory)
    self.unread = set(names)

  def get(self, name: str, *shape: int) -> np.ndarray:
    """Returns a tensor; raises UserError if it is missing or has no `shape`."""
    self.unread.discard(name)
    return families.get_checked(self._get, name, *shape)

  def affine(self, name: str, outputs: int, inputs: int) -> params_lib.Params:
    """Returns weight [in, out] and bias of a linear layer."""
    return {
      'weight': self.get(f'{name}.weight', outputs, inputs).T,
      'bias': self.get(f'{name}.bias', outputs),
    }


def _arrays(tensors: _Tensors, config: ModelConfig) -> params_lib.Params:
  """Returns host arrays of what is stored, as `param_specs` says."""
  head, width = config.recurrent, config.embed_dim
  arrays: params_lib.Params = {
    'layers': [],
    'blocks': [
      tensors.affine(f'lm_head.{i}.linear', head.width, head.width)
      for i in range(head.num_blocks)
    ],
    'unembedding': tensors.get(
      f'lm_head.{head.num_blocks}.weight', config.num_logits, head.width
    ),
  }
  if not head.is_sum:
    state = tensors.affine('rnn_u', width, width)
    token = tensors.get('rnn_w.weight', width, width).T
    weight = np.concatenate([token, state['weight']])
    arrays['recurrence'] = {**state, 'weight': weight}
  if head.width != 2 * width:
    arrays['head_input'] = tensors.affine('input_proj', head.width, 2 * width)
  if config.output_vocab_size:
    arrays['output_token_ids'] = np.arange(config.num_logits, dtype=np.int32)
  return arrays
