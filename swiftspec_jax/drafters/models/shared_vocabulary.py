"""Stand-alone drafts whose vocabulary is not quite their target's.

Models of one family pad their tables to different numbers of rows
(Qwen2.5-0.5B has 151,936, the 7B has 152,064), and newer tokenizers know more
tokens after the old ones. A draft gets the target's number of rows when it is
loaded, so that distributions of both have one shape, and proposes only the
tokens that both tokenizers have.
"""

import dataclasses

import jax
import numpy as np

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models.matrices.stored_blocks import StoredBlocks
from swiftspec_jax.models.model import Model


def fit(
  config: ModelConfig,
  name: str,
  tokenizer: tokenizer_lib.Tokenizer,
  target: Model,
) -> ModelConfig:
  """Returns the configuration of a draft with the target's vocabulary.

  Args:
    config: the draft's, as its files have it.
    name: the draft's, for messages.
    tokenizer: the draft's.
    target: model that it will draft for.

  Raises:
    UserError: a token id has another token in each.
  """
  num_shared = tokenizer_lib.num_shared_tokens(
    target.name, target.tokenizer, name, tokenizer
  )
  num_rows = target.config.vocab_size
  num_shared = min(num_shared, config.num_logits, num_rows)
  return dataclasses.replace(
    config,
    vocab_size=num_rows,
    shared_vocab_size=None if num_shared == num_rows else num_shared,
  )


def fit_place(place: families.Place, config: ModelConfig) -> families.Place:
  """Returns `place` for arrays and specs of the draft as its files have them.

  Rows of tokens that the draft does not know become zeros.

  Args:
    place: function that puts parameters on the devices.
    config: configuration from `fit`.
  """
  sizes = {
    'vocab': (config.vocab_size, config.padded_vocab_size),
    'outputs': (config.num_logits, config.padded_num_logits),
  }

  def fit_spec(spec):
    size, padded = sizes.get(spec.axes[0], (None, None))
    if size is None:
      return spec
    width = spec.shape[1:]
    return dataclasses.replace(
      spec, shape=(size, *width), padded_shape=(padded, *width)
    )

  def fit_array(spec, array):
    size, _ = sizes.get(spec.axes[0], (None, None))
    if size is None or array.shape[0] == size:
      return array
    if isinstance(array, StoredBlocks):
      raise errors.UserError(
        f"weight_dtype='stored' keeps the {array.shape[0]} rows of a draft's "
        f'table, and {size} are needed; leave out its weight_dtype'
      )
    missing = max(size - len(array), 0)
    return np.pad(array[:size], ((0, missing), (0, 0)))

  return lambda arrays, specs: place(
    jax.tree.map(fit_array, specs, arrays), jax.tree.map(fit_spec, specs)
  )


def check(target: Model, draft: Model) -> None:
  """Raises UserError unless distributions of both are of the same tokens."""
  if draft.tokenizer is not target.tokenizer:
    tokenizer_lib.num_shared_tokens(
      target.name, target.tokenizer, draft.name, draft.tokenizer
    )
  num_rows = target.config.vocab_size
  if draft.config.vocab_size != num_rows:
    raise errors.UserError(
      f'{draft.name} has {draft.config.vocab_size} rows of tokens and '
      f'{target.name} has {num_rows}; load the draft with draft_of=target'
    )
