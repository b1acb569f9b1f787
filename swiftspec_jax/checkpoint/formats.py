"""The formats of checkpoints: an entry for each."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.checkpoint import hf, orbax
from swiftspec_jax.checkpoint.drafts import dflash, eagle3, mtp, redrafter
from swiftspec_jax.checkpoint.drafts import draft as draft_lib
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.models import families
from swiftspec_jax.models import params as params_lib
from swiftspec_jax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Source:
  """A model whose weights are not read yet.

  Attributes:
    config: configuration of the checkpoint.
    read_tokenizer: function that returns the tokenizer of the checkpoint, or of
      the target that a draft was made for.
    read_params: function that reads the parameters for a configuration.
    reads_target: whether that takes weights of the target, so that all
      processes must have a part in it.
    end_token_ids: end tokens of sources that are sometimes left over from
      another vocabulary.
    block_kinds: kinds of the blocks that its weights are in, those of
      `gguf_blocks.native.KINDS`; None where weights cannot be 'stored'.
  """

  config: ModelConfig
  read_tokenizer: Callable[[], tokenizer_lib.Tokenizer]
  read_params: Callable[[ModelConfig, families.Place], params_lib.Params]
  reads_target: bool = False
  end_token_ids: tuple[int, ...] = ()
  block_kinds: frozenset[str] | None = None


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
  except ModuleNotFoundError as error:
    raise errors.UserError(
      f'{path} cannot be read without the package {error.name}; run `pip '
      f'install {error.name}`'
    ) from error
  file = gguf_lib.GGUFFile(path)

  def read_tokenizer():
    from swiftspec_jax.checkpoint import gguf_tokenizer  # imports transformers

    return gguf_tokenizer.from_metadata(file.metadata)

  return Source(
    config=file.config(),
    read_tokenizer=read_tokenizer,
    read_params=file.read_params,
    block_kinds=file.block_kinds,
  )


def _of_draft(module) -> Format:
  """Returns the format of a draft that is made for one target.

  `module.open_draft` returns its configuration, and what reads host arrays for
  a configuration; tables of the target that it takes are padded.
  """

  def open_source(directory: pathlib.Path, target: Model | None) -> Source:
    if target is None:
      raise errors.UserError(
        f'{directory} is {module.KIND} and cannot be loaded alone; load it '
        'with draft_of=target'
      )
    config, read_arrays = module.open_draft(directory, target)
    return Source(
      config=config,
      read_tokenizer=lambda: target.tokenizer,
      read_params=lambda config, place: place(
        read_arrays(config), params_lib.param_specs(config)
      ),
      reads_target=True,
    )

  return Format(module.matches, open_source)


def _open_directory(directory: pathlib.Path, _: Model | None) -> Source:
  """Opens what `save` wrote, or a directory in Hugging Face layout."""
  is_own = orbax.is_checkpoint(directory)
  reader = orbax if is_own else hf
  return Source(
    config=reader.read_config(directory),
    read_tokenizer=functools.partial(_read_tokenizer, directory),
    read_params=functools.partial(reader.read_params, directory),
    end_token_ids=() if is_own else tuple(hf.end_token_ids(directory)),
  )


def _read_tokenizer(directory: pathlib.Path) -> tokenizer_lib.Tokenizer:
  import transformers  # here, as it takes long

  try:
    return transformers.AutoTokenizer.from_pretrained(directory)
  except (OSError, KeyError, TypeError, ValueError) as error:
    reason = str(error).partition('\n')[0]
    raise errors.UserError(
      f'{directory} has no usable tokenizer; its tokenizer.json belongs there '
      f'({reason})'
    ) from error


# The first one that matches.
FORMATS = (
  *map(_of_draft, (draft_lib, dflash, eagle3, redrafter, mtp)),
  Format(lambda path, _: path.is_dir(), _open_directory),
  Format(lambda path, _: path.suffix == '.gguf', _open_gguf),
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
