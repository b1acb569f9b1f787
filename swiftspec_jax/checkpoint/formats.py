"""The formats of checkpoints: an entry for each."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import end_tokens, hf, orbax
from swiftspec_jax.checkpoint.drafts import dflash, eagle3, mtp, redrafter
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.model import Model
from swiftspec_jax.models import families
from swiftspec_jax.models import params as params_lib


@dataclasses.dataclass(frozen=True)
class Source:
  """A model whose weights are not read yet.

  Attributes:
    config: configuration of the checkpoint.
    tokenizer: tokenizer of the checkpoint; a draft for one target has its own.
    read_params: function that reads the parameters for a configuration.
    reads_target: whether that takes weights of the target, so that all
      processes must have a part in it.
  """

  config: ModelConfig
  tokenizer: tokenizer_lib.Tokenizer
  read_params: Callable[[ModelConfig, families.Place], params_lib.Params]
  reads_target: bool = False


class Format(NamedTuple):
  """A format of checkpoints.

  Attributes:
    matches: function that says whether a file or directory has the format.
    open: function that opens one, for a target if the model is to draft.
  """

  matches: Callable[[pathlib.Path, Model | None], bool]
  open: Callable[[pathlib.Path, Model | None], Source]


def _open_gguf(path: pathlib.Path, _: Model | None) -> Source:
  try:  # other models need no package for these files
    from swiftspec_jax.checkpoint import gguf as gguf_lib
    from swiftspec_jax.checkpoint import gguf_tokenizer
  except ModuleNotFoundError as error:
    raise errors.UserError(
      f'{path} cannot be read without the package {error.name}; run `pip '
      f'install {error.name}`'
    ) from error
  file = gguf_lib.GGUFFile(path)
  tokenizer = gguf_tokenizer.from_metadata(file.metadata)
  return Source(
    config=end_tokens.complete(file.config(), tokenizer),
    tokenizer=tokenizer,
    read_params=file.read_params,
  )


def _of_draft(module) -> Format:
  """Returns the format of a draft that is made for one target."""

  def open_source(directory: pathlib.Path, target: Model | None) -> Source:
    draft = module.open_draft(directory, target)
    return Source(
      config=draft.config,
      tokenizer=draft.target.tokenizer,
      read_params=draft.read_params,
      reads_target=True,
    )

  return Format(module.matches, open_source)


def _open_directory(directory: pathlib.Path, _: Model | None) -> Source:
  """Opens what `save` wrote, or a directory in Hugging Face layout."""
  is_own = orbax.is_checkpoint(directory)
  reader = orbax if is_own else hf
  config = reader.read_config(directory)
  import transformers  # here, as it takes long

  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  except (OSError, KeyError, TypeError, ValueError) as error:
    reason = str(error).partition('\n')[0]
    raise errors.UserError(
      f'{directory} has no usable tokenizer; its tokenizer.json belongs there '
      f'({reason})'
    ) from error
  others = () if is_own else hf.end_token_ids(directory)
  return Source(
    config=end_tokens.complete(config, tokenizer, others),
    tokenizer=tokenizer,
    read_params=functools.partial(reader.read_params, directory),
  )


# The first one that matches.
FORMATS = (
  Format(lambda path, _: path.suffix == '.gguf', _open_gguf),
  *map(_of_draft, (draft_lib, dflash, eagle3, redrafter, mtp)),
  Format(lambda path, _: path.is_dir(), _open_directory),
)


def open_source(path: pathlib.Path, draft_of: Model | None) -> Source:
  """Opens a checkpoint of any format.

  Args:
    path: file or directory.
    draft_of: target that the model will draft for, if it is to draft.

  Raises:
    UserError: the checkpoint is broken or of no known format.
  """
  for each in FORMATS:
    if each.matches(path, draft_of):
      return each.open(path, draft_of)
  raise errors.UserError(
    f'{path} is neither a model directory nor a .gguf file'
  )
