"""Rules of prose: pages break none, docstrings fewer and fewer.

  python tests/prose_test.py

lists every place that breaks a rule.
"""

import ast
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('swiftspec_jax', 'kernels_pallas', 'experiments')
# May only fall: lower a number as you mend docstrings.
MOST_IN_DOCSTRINGS = {
  'entry without a noun': 137,
  'phrase': 15,
  'long sentence': 9,
}

_LONGEST_SENTENCE = 32  # words
_PHRASES = ('so many', 'likewise', 'as for', 'lest', 'made-up', 'of those that')
_PHRASE = re.compile(rf'\b({"|".join(_PHRASES)})\b', re.IGNORECASE)
# An entry of a docstring is 'name: a noun phrase'.
_ENTRY = re.compile(r'^ +\w+: (of|as|for|in|on|to|by|from|with|what|that)\b')
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
  """Returns (path, rule, words) of pages, and of docstrings."""
  of_pages = [
    (path, *fault) for path in pages() for fault in faults_of_page(path)
  ]
  of_docstrings = [
    (path, *fault)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob('*.py'))
    for text in docstrings(path)
    for fault in faults_of_docstring(text)
  ]
  return of_pages, of_docstrings


def test_rules_find_what_they_forbid():
  long = ' '.join(['word'] * 33)
  assert faults_of_text('Takes so many. Likewise.\n\nGood.') == [
    ('phrase', 'so many'),
    ('phrase', 'likewise'),
  ]
  assert faults_of_text(f'Short. {long}. Short.')[0][0] == 'long sentence'
  assert not faults_of_text('A sentence. ' * 33)
  entries = 'Does.\n\nArgs:\n  a: of the model.\n  b: Name of the model.\n'
  assert faults_of_docstring(entries) == [
    ('entry without a noun', 'a: of the model.')
  ]


def test_pages_and_docstrings():
  of_pages, of_docstrings = all_faults()
  assert not of_pages
  counts = collections.Counter(rule for _, rule, _ in of_docstrings)
  for rule, most in MOST_IN_DOCSTRINGS.items():
    assert counts[rule] <= most, (
      f'{rule}: {counts[rule]} in docstrings; python tests/prose_test.py lists '
      'them'
    )


if __name__ == '__main__':
  for faults in all_faults():
    for path, rule, words in faults:
      sys.stdout.write(f'{path.relative_to(ROOT)}: {rule}: {words}\n')
    sys.stdout.write(f'{collections.Counter(r for _, r, _ in faults)}\n')
