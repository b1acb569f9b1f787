"""Models for tests and notebooks that need no download and no torch.

`write_tiny_checkpoint` writes checkpoints of every family, whose weights are
the same everywhere. `table_model` makes a model whose distribution is a table
that a reader can check by hand. `random_model` makes one of any configuration.
"""

from swiftspec_jax.testing.byte_tokenizer import byte_tokenizer
from swiftspec_jax.testing.random_model import random_model
from swiftspec_jax.testing.table_model import table_model
from swiftspec_jax.testing.tiny_checkpoint import (
  TINY_FAMILIES,
  write_tiny_checkpoint,
)

__all__ = [
  'TINY_FAMILIES',
  'byte_tokenizer',
  'random_model',
  'table_model',
  'write_tiny_checkpoint',
]
