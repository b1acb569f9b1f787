"""Texts for task prompts: files of the user, or what packages bring along."""

import ast
import functools
import glob
import importlib.metadata
import pathlib
import re
import textwrap
from collections.abc import Sequence

import numpy as np

from swiftspec_jax import errors

_TEXT_SUFFIXES = ('.md', '.rst', '.txt')
_MAX_BYTES = 400_000
_MIN_CHARACTERS = 200
_MIN_DOCSTRING = 400
_MIN_ADDED = 64
_LEAST_LETTERS = 0.5  # share; else it is a table of numbers
_DULL = re.compile(
  'top_level|entry_points|RECORD|requirements|licen[cs]e|copying|notice', re.I
)
_WORD = re.compile(r'\b[a-z]{5,14}\b')


def find_files(patterns: Sequence[str]) -> list[pathlib.Path]:
  """Returns the files of glob patterns, or those of installed packages.

  Args:
    patterns: patterns as in a shell, `**` included. None given: readmes,
      documentation and Python sources (for their docstrings) of all packages
      that are installed here.

  Raises:
    UserError: a pattern matches no file.
  """
  if not patterns:
    return _package_files()
  paths = []
  for pattern in patterns:
    found = [
      pathlib.Path(name)
      for name in glob.glob(
        str(pathlib.Path(pattern).expanduser()), recursive=True
      )
    ]
    found = [path for path in found if path.is_file()]
    if not found:
      raise errors.UserError(
        f'--documents={pattern} matches no file; give paths or quoted glob '
        'patterns of text files'
      )
    paths += found
  return sorted(set(paths))


def _package_files() -> list[pathlib.Path]:
  paths = set()
  for distribution in importlib.metadata.distributions():
    for file in distribution.files or ():
      is_text = file.suffix in _TEXT_SUFFIXES and not _DULL.search(file.name)
      is_source = file.suffix == '.py' and 'test' not in str(file)
      if is_text or is_source or file.name == 'METADATA':
        paths.add(pathlib.Path(distribution.locate_file(file)))
  return sorted(paths)


@functools.lru_cache(maxsize=8192)
def read_texts(path: pathlib.Path) -> list[str]:
  """Returns the texts of a file; docstrings and long functions of a source.

  A file that is unreadable, binary or very large gives none.
  """
  try:
    if path.stat().st_size > _MAX_BYTES:
      return []
    text = path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError):
    return []
  if path.suffix == '.py':
    return _texts_of_source(text)
  if path.name == 'METADATA':
    text = text.partition('\n\n')[2]
  text = text.strip()
  return [text] if len(text) >= _MIN_CHARACTERS else []


def _texts_of_source(source: str) -> list[str]:
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError):
    return []
  texts, lines = [], source.split('\n')
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
      doc = ast.get_docstring(node)
      if doc and len(doc) >= _MIN_DOCSTRING:
        texts.append(doc)
    if isinstance(node, ast.FunctionDef):
      code = '\n'.join(lines[node.lineno - 1 : node.end_lineno])
      code = textwrap.dedent(code)
      if 8 <= code.count('\n') <= 60 and code.count('\n') % 4 == 0:
        texts.append('```python\n' + code + '\n```')
  return texts


class Library:
  """Draws passages from files, and from texts that were added.

  A file is read when it is first drawn.
  """

  def __init__(self, paths: Sequence[pathlib.Path]):
    # Few files would else be drowned by thousands of sources.
    is_source = [path.suffix == '.py' for path in paths]
    self._sources = [p for p, s in zip(paths, is_source, strict=True) if s]
    self._prose = [p for p, s in zip(paths, is_source, strict=True) if not s]
    self._added: list[str] = []
    if not paths:
      raise errors.UserError(
        'there are no documents; name text files with --documents'
      )

  def add(self, texts: Sequence[str]) -> None:
    """Adds texts, such as articles that the target wrote."""
    self._added += texts

  def invented(self, rng: np.random.Generator, num_characters: int) -> str:
    """Returns one or more of the added texts; '' if there are too few."""
    if len(self._added) < _MIN_ADDED:
      return ''
    texts = []
    while sum(map(len, texts)) < 0.7 * num_characters and len(texts) < 6:
      texts.append(self._added[rng.integers(len(self._added))])
    if len(texts) > 1:
      form = ('[{}] {}', 'Passage {}: {}', '{}. {}')[rng.integers(3)]
      texts = [form.format(i, text) for i, text in enumerate(texts, 1)]
    return '\n\n'.join(texts)[:num_characters]

  def passage(self, rng: np.random.Generator, num_characters: int) -> str:
    """Returns a run of whole lines of about `num_characters`.

    Raises:
      UserError: none of many files drawn has enough text.
    """
    for _ in range(500):
      has_both = self._sources and self._prose
      use_source = rng.random() < 0.5 if has_both else bool(self._sources)
      paths = self._sources if use_source else self._prose
      texts = read_texts(paths[rng.integers(len(paths))])
      if not texts:
        continue
      text = texts[rng.integers(len(texts))]
      if len(text) < 0.4 * num_characters:
        continue
      passage = _cut(text, rng, num_characters)
      if sum(map(str.isalpha, passage)) > _LEAST_LETTERS * len(passage):
        return passage
    raise errors.UserError(
      f'the documents hold hardly any text of {num_characters} characters; '
      'name more or longer files with --documents'
    )

  def word(self, rng: np.random.Generator) -> str:
    """Returns a word of the documents."""
    return word_in(self.passage(rng, 400), rng) or 'history'


def word_in(text: str, rng: np.random.Generator) -> str:
  """Returns a word of a text; '' if it has none of some length."""
  words = _WORD.findall(text)
  return str(words[rng.integers(len(words))]) if words else ''


def _cut(text: str, rng: np.random.Generator, num_characters: int) -> str:
  """Cuts a passage at line ends, else at spaces."""
  latest = max(len(text) - num_characters, 0)
  start = int(rng.integers(latest + 1))
  if start > 0:
    line = text.rfind('\n', 0, start) + 1
    start = line if start - line < 400 else text.find(' ', start) + 1
  end = min(start + num_characters, len(text))
  if end < len(text):
    line = text.rfind('\n', start + num_characters // 2, end)
    end = line if line > 0 else max(text.rfind(' ', start, end), start + 1)
  return text[start:end].strip()
