"""Rules of prose, for pages and docstrings.

  python tests/prose_test.py

lists every place that breaks a rule.
"""

import ast
import inspect
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('swiftspec_jax', 'kernels_pallas', 'experiments')


_LONGEST_SENTENCE = 32  # words
_PHRASES = ('so many', 'likewise', 'as for', 'lest', 'made-up', 'of those that')
# What comes later is after something; a thing in front of it hides what is
# behind it.
_BEHIND = ''.join(
  rf'(?<!\b{word} )'
  for word in ('hidden', 'hide', 'lag', 'wait', 'engine', 'host')
)
_PHRASE = re.compile(
  rf'\b({"|".join(_PHRASES)}|{_BEHIND}behind)\b', re.IGNORECASE
)
# An entry of a docstring is 'name: a noun phrase'.
_NO_NOUN = (
  'of|as|at|for|in|on|to|by|from|with|what|that|whose|where|when|how|which|its|'
  'their|called|gets|returns|says|takes|static[.;]'
)
_ENTRY = re.compile(rf'^ +\w+: ({_NO_NOUN})(\b|(?<=[.;]))')
_SECTIONS = ('Args:', 'Attributes:')
_CODE = re.compile(r'```.*?```|<!--.*?-->|<[^>]+>', re.DOTALL)
# Rows of tables, headings, and code that is indented.
_NO_PROSE = re.compile(r'^(\||#| {4,}[^ *-]|\[!|!\[).*$', re.MULTILINE)
_LINK = re.compile(r'\]\([^)]*\)')
_SENTENCE_END = re.compile(r'(?<=[.:!?])[)*`]*\s|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s')


def pages():
  """Returns all Markdown files that people read."""
  first = ROOT / 'README.md', ROOT / 'CONTRIBUTING.md'
  return [*first, *sorted(ROOT.glob('docs/**/*.md'))]


def faults_of_text(text):
  """Returns the rule and the words of each fault."""
  found = [('phrase', match[0].lower()) for match in _PHRASE.finditer(text)]
  for sentence in _SENTENCE_END.split(text):
    words = sentence.split()
    if len(words) > _LONGEST_SENTENCE:
      found.append(('long sentence', ' '.join(words[:8])))
  return found


def faults_of_page(path):
  text = _NO_PROSE.sub('\n', _CODE.sub('', path.read_text()))
  return faults_of_text(_LINK.sub(']', text))


def docstrings(path):
  """Yields the docstrings of a module."""
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield text


def faults_of_docstring(text):
  prose, _, rest = text.partition('\n\nArgs:')
  found = faults_of_text(_NO_PROSE.sub('\n', prose))
  found += [('phrase', m[0].lower()) for m in _PHRASE.finditer(rest)]
  section = ''
  for line in text.splitlines():
    if line in _SECTIONS:
      section = line
    elif section and not line.startswith(' ') and line:
      section = ''
    elif section and _ENTRY.match(line):
      found.append(('entry without a noun', line.strip()))
  return found


def all_faults():
  """Yields 'path: rule: words' of each fault."""
  for path in pages():
    for fault in faults_of_page(path):
      yield _line(path, *fault)
  for package in PACKAGES:
    for path in sorted((ROOT / package).rglob('*.py')):
      for text in docstrings(path):
        for fault in faults_of_docstring(text):
          yield _line(path, *fault)


def _line(path, rule, words):
  return f'{path.relative_to(ROOT)}: {rule}: {words}'


def test_rules_find_what_they_forbid():
  long = ' '.join(['word'] * 33)
  assert faults_of_text('Takes so many. Likewise.\n\nGood.') == [
    ('phrase', 'so many'),
    ('phrase', 'likewise'),
  ]
  assert faults_of_text(f'Short. {long}. Short.')[0][0] == 'long sentence'
  assert not faults_of_text('A sentence. ' * 33)
  entries = """Does.

  Args:
    a: of the model.
    b: name of the model.
    c: static.
    d: static name of the model.
  """
  assert faults_of_docstring(inspect.cleandoc(entries)) == [
    ('entry without a noun', 'a: of the model.'),
    ('entry without a noun', 'c: static.'),
  ]


def test_pages_and_docstrings():
  assert not list(all_faults())


if __name__ == '__main__':
  sys.stdout.writelines(f'{fault}\n' for fault in all_faults())
