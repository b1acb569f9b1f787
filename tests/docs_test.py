"""The docs: pages of results, figures, pictures and links."""

import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest

from docs.tools import pictures, results
from swiftspec_jax import errors
from swiftspec_jax.checkpoint import gguf, hf
from swiftspec_jax.cli import short_help
from swiftspec_jax.models import families

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = sorted(results.DIRECTORY.glob('*.json'))
PAGES = [
  ROOT / 'README.md',
  ROOT / 'CONTRIBUTING.md',
  *ROOT.glob('docs/**/*.md'),
]
_LINK = re.compile(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"')


@pytest.mark.parametrize('path', RESULTS, ids=lambda path: path.stem)
def test_pages_of_results_say_what_their_files_say(path):
  page = path.with_suffix('.md').read_text()
  assert page == results.render(path), 'run docs.tools.results'


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    ('"machine": "2', '"machin": "2', 'has no machine'),
    ('"as they are", ', '', '4 columns, but this row has 3 cells'),
  ],
)
def test_results_must_be_complete(tmp_path, old, new, message):
  text = (results.DIRECTORY / 'weights.json').read_text()
  assert old in text
  path = tmp_path / 'weights.json'
  path.write_text(text.replace(old, new))
  with pytest.raises(errors.UserError, match=message):
    results.render(path)


def test_the_table_of_families_is_that_of_the_code():
  path = ROOT / 'docs' / 'how_to' / 'models.md'
  _, _, rest = path.read_text().partition('| `model_type` |')
  lines = rest.partition('\n\n')[0].splitlines()[2:]
  rows = [line.strip('| ').split(' | ') for line in lines]
  assert [row[0] for row in rows] == [f'`{x}`' for x in families.FAMILIES]
  for family, (_, _, *cells) in zip(families.FAMILIES, rows, strict=True):
    is_in_gguf = family in {*gguf.FAMILIES.values(), 'mistral'}
    config = hf.config_of(path, {'model_type': family})
    is_dense = config.experts is None
    assert cells == [
      'yes',
      'yes' if is_in_gguf else 'no',
      'no' if family == 'gpt_oss' else 'yes',  # int4 as published
      'yes' if is_dense else 'int8, int4, float8, mxfp4',
    ], family


def test_figures_can_be_read_without_eyes():
  for path in (ROOT / 'docs' / 'images').glob('*.svg'):
    if not path.stem.endswith(('-light', '-dark')):  # matplotlib's
      figure = ET.parse(path).getroot()
      assert figure.get('role') == 'img'
      assert figure[0].tag.endswith('title')
      assert figure[0].text


@pytest.mark.parametrize('make', [pictures.draw_round, pictures.draw_speed])
def test_pictures_fit_both_themes(make):
  light, dark = (pictures.as_svg(make, theme) for theme in ('light', 'dark'))
  ET.fromstring(light)
  assert b'#e5e7eb' in dark
  assert b'#e5e7eb' not in light


def anchors(path):
  """Returns the anchors of a page's headings."""
  headings = re.findall(r'^#+ (.*)$', path.read_text(), re.MULTILINE)
  return {
    re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in headings
  }


def test_links_lead_somewhere():
  for page in PAGES:
    text = re.sub(r'```.*?```', '', page.read_text(), flags=re.DOTALL)
    for link in (a or b for a, b in _LINK.findall(text)):
      name, _, anchor = link.partition('#')
      if not name.startswith('https:'):
        path = page.parent / name if name else page
        assert path.exists(), f'{page}: {link}'
        assert not anchor or anchor in anchors(path), f'{page}: {link}'


# Of absl and of other programs.
_OTHER_FLAGS = {
  'fix',
  'help',
  'helpfull',
  'install',
  'local',
  'no',
  'revision',
  'verbosity',
}


def test_programs_flags_and_files_that_pages_name_exist():
  folders = ROOT / 'swiftspec_jax' / 'cli', ROOT / 'experiments'
  sources = ''.join(
    p.read_text() for folder in folders for p in folder.glob('**/*.py')
  )
  quoted = set(re.findall(r"'(\w+)'", sources)) | _OTHER_FLAGS
  targets = (ROOT / 'Makefile').read_text()
  for page in PAGES:
    # What runs an earlier commit names what it had.
    text = re.sub(
      r'^    git checkout (.+\\\n)*.*', '', page.read_text(), flags=re.M
    )
    for flag in re.findall(r'(?<![\w-])--(\w+)', text):
      names = {flag, flag.removeprefix('no'), flag.removesuffix('_weight')}
      assert names & quoted, f'{page}: --{flag}'
    for name in re.findall(r'-m experiments\.([a-z][\w.]*\w)', text):
      found = importlib.util.find_spec(f'experiments.{name}')
      assert found is not None, f'{page}: {name}'
    for name in re.findall(r'swiftspec ([a-z_]+) --', text):
      assert name in short_help.COMMANDS, f'{page}: swiftspec {name}'
    for name in re.findall(r'`make ([\w-]+)`', text):
      assert f'\n{name}: ##' in targets, f'{page}: make {name}'
    packages = 'swiftspec_jax|kernels_pallas|experiments|docs'
    for name in re.findall(rf'`((?:{packages})/[\w./-]+)`', text):
      assert (ROOT / name).exists(), f'{page}: {name}'
