"""A model whose distribution is a table that a reader can check by hand."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models

from swiftspec_jax import errors
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.model import Model
from swiftspec_jax.runtime import sharding

# What a table's probability of zero becomes; its exponential is zero.
_LOG_ZERO = -1e4


def table_model(
  table: np.ndarray,
  *,
  name: str = 'table',
  eos_token_ids: Sequence[int] = (),
  max_context: int = 1024,
  devices: Sequence[jax.Device] | None = None,
) -> Model:
  """Returns a model whose next-token distribution is a table.

  It is a decoder without layers: the embedding is one-hot and the
  unembedding holds the logarithms. Its tokens are the letters a, b, c, ...

  Args:
    table: f[V, V] probabilities; row i is the distribution of the token after
      token i. Logits are the logarithms, that of zero is -1e4.
    name: name for messages and results.
    eos_token_ids: tokens that end an output.
    max_context: token limit, prompt and output together.
    devices: same as in `swiftspec_jax.load`.

  Raises:
    UserError: the table is not square, or a row is no probability distribution.
  """
  table = np.asarray(table, np.float64)
  if table.ndim != 2 or table.shape[0] != table.shape[1]:
    raise errors.UserError(f'the table must be square, got {table.shape}')
  if (table < 0).any() or not np.allclose(table.sum(axis=1), 1):
    raise errors.UserError(
      f'each row of the table must sum to 1, got {table.sum(axis=1)}'
    )
  # A power of two as the scale, so that norm and product round nothing.
  scale = 2
  while scale**2 < len(table):
    scale *= 2
  mesh = sharding.make_mesh(devices)
  config = ModelConfig(
    family='llama',
    vocab_size=len(table),
    num_layers=0,
    embed_dim=scale**2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    ffw_dim=1,
    max_context=max_context,
    eos_token_ids=tuple(eos_token_ids),
    norm_eps=1e-12,
    tie_embeddings=False,
    num_shards=mesh.devices.size,
  )
  arrays = _table_params(table, scale)
  specs = params_lib.param_specs(config)
  return Model(
    name=name,
    config=config,
    params=params_lib.place_params(arrays, specs, jnp.float32, mesh),
    dtype=jnp.dtype(jnp.float32),
    mesh=mesh,
    tokenizer=_letters(len(table)),
  )


def _table_params(table: np.ndarray, scale: int) -> params_lib.Params:
  shape = (len(table), scale**2)
  with np.errstate(divide='ignore'):
    logs = np.maximum(np.log(table), _LOG_ZERO)
  unembedding = np.zeros(shape, np.float32)
  unembedding[:, : len(table)] = logs.T / scale
  return {
    # One-hot of root mean square one: the norm keeps it as it is.
    'embedding': np.eye(*shape, dtype=np.float32) * np.float32(scale),
    'layers': [],
    'final_norm': np.ones(scale**2, np.float32),
    'unembedding': unembedding,
  }


def _letters(size: int) -> transformers.PreTrainedTokenizerFast:
  """A tokenizer whose tokens are a, b, c, ..."""
  letters = [c for c in map(chr, range(ord('a'), 0x30000)) if c.isalpha()]
  vocabulary = {letter: i for i, letter in enumerate(letters[:size])}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.decoder = decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, clean_up_tokenization_spaces=False
  )
