"""Texts as long as a study needs, from files."""

import glob
import pathlib
from collections.abc import Sequence

import swiftspec_jax as ss
from swiftspec_jax import errors


def read(
  target: ss.Model, patterns: Sequence[str], num_texts: int, size: int
) -> list[list[int]]:
  """Returns the first tokens of files put together, cut into texts.

  Args:
    target: model whose tokens they are.
    patterns: names of the files, as glob patterns.
    num_texts: number of texts.
    size: tokens of each.

  Raises:
    UserError: a pattern matches no file, or the files are too short.
  """
  token_ids: list[int] = []
  for pattern in patterns:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
      raise errors.UserError(f'--texts={pattern} matches no file')
    for path in map(pathlib.Path, paths):
      text = path.read_text(encoding='utf-8')
      token_ids += target.tokenizer.encode(text, add_special_tokens=False)
  needed = num_texts * size
  if len(token_ids) < needed:
    raise errors.UserError(
      f'--texts have {len(token_ids)} tokens, and {needed} are needed; name '
      'more files, or take fewer or shorter texts'
    )
  starts = range(0, needed, size)
  return [token_ids[start : start + size] for start in starts]
