"""The page of result folders, and the comparison of two."""

import html.parser
import json

import numpy as np
import programs
import pytest

from experiments.output import report_page, result_folder, run_comparison
from experiments.output.result_folder import Sample
from swiftspec_jax import errors


def write(folder, name, *values):
  folder.mkdir(exist_ok=True)
  lines = ''.join(f'{json.dumps(value)}\n' for value in values)
  (folder / name).write_text(lines)


def record(mode, question, tokens, seconds):
  names = {'mode': mode, 'question_id': question, 'repeat': 0}
  figures = {'new_tokens': tokens, 'decode_seconds': seconds}
  return {**names, **figures, 'token_ids': [1, 2]}


def benchmark(folder, factor):
  """Writes a benchmark whose second mode is `factor` times as fast."""
  records = [
    record(mode, question, 10 * (question + 1), (question + 1) / speed)
    for question in range(6)
    for mode, speed in (('autoregressive', 1), ('auto', factor))
  ]
  write(folder, 'results.jsonl', *records)
  modes = {'auto': {'speedup': factor, 'tasks': {}}, '<b>': {'speedup': None}}
  facts = {'argv': ['python', '-m', 'x'], 'cpu': 'A&B', 'kernels': [{}]}
  write(folder, 'summary.json', {'modes': modes, 'provenance': facts})
  return folder


class Page(html.parser.HTMLParser):
  """Elements of a page, with their attributes, and its texts."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.texts = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.texts.append(data)

  def values(self, *names):
    pairs = (pair for _, attrs in self.elements for pair in attrs.items())
    return [value for name, value in pairs if name in names]


def test_a_benchmark_is_read(tmp_path):
  folder = result_folder.read(benchmark(tmp_path / 'a', 2))
  assert folder.unit == result_folder.TOKENS
  assert folder.facts == {'argv': 'python -m x', 'cpu': 'A&B'}
  assert len(folder.samples) == 12
  assert [row['mode'] for row in folder.tables['summary.json']] == [
    'auto',
    '<b>',
  ]
  assert 'token_ids' not in folder.tables['results.jsonl'][0]


@pytest.mark.parametrize(
  ('row', 'sample'),
  [
    (
      {'policy': 'none', 'request_rate': 2.0, 'seed': 1, 'mean_e2e_latency': 3},
      Sample(group='none at 2/s', key='1', amount=1, seconds=3),
    ),
    (
      {
        'kernel': 'swiglu',
        'shape': 'small',
        'implementation': None,
        'seconds': {'reference': 0.5},
      },
      Sample(group='swiglu', key='small', amount=1, seconds=0.5),
    ),
    (
      {
        'section': 'kernels',
        'name': 'swiglu',
        'shape': 'T8',
        'seconds': 0.25,
        'status': 'ok',
      },
      Sample(group='swiglu', key='T8', amount=1, seconds=0.25),
    ),
  ],
)
def test_rows_of_other_programs_are_read(tmp_path, row, sample):
  write(tmp_path / 'a', 'rows.jsonl', row)
  folder = result_folder.read(tmp_path / 'a')
  assert folder.samples == [sample]
  assert folder.unit == result_folder.SECONDS


def test_what_is_no_result(tmp_path):
  with pytest.raises(errors.UserError, match='has no results'):
    result_folder.read(tmp_path)
  write(tmp_path, 'rows.jsonl', {'kernel': 'a'})
  (tmp_path / 'rows.jsonl').write_text('{"a": 1}\n{"a"')  # killed in a line
  assert result_folder.read(tmp_path).tables == {'rows.jsonl': [{'a': 1}]}
  (tmp_path / 'rows.jsonl').write_text('nonsense\n')
  with pytest.raises(errors.UserError, match=r'rows\.jsonl is no JSON'):
    result_folder.read(tmp_path)


def test_ratios_are_those_of_totals_and_intervals_cover_them():
  generator = np.random.default_rng(1)
  first = [
    Sample(group='a', key=str(i), amount=8, seconds=2) for i in range(30)
  ]
  second = [
    Sample(group='a', key=str(i), amount=8, seconds=s)
    for i, s in enumerate(generator.uniform(0.8, 1.2, 30))
  ]
  (ratio,) = run_comparison.compare(first, second)
  want = 60 / sum(sample.seconds for sample in second)
  assert ratio['speed ratio'] == pytest.approx(want)
  assert ratio['from (95 %)'] < want < ratio['to']
  # The standard error of the mean, as textbooks have it.
  error = np.std([s.seconds for s in second]) / np.sqrt(30)
  width = ratio['to'] - ratio['from (95 %)']
  assert width == pytest.approx(4 * error * 2, rel=0.3)


def test_what_only_one_run_has_is_left_out_and_few_samples_have_no_interval():
  first = [
    Sample(group=g, key=k, amount=1, seconds=2) for g in 'ab' for k in 'xy'
  ]
  second = [
    Sample(group='a', key='y', amount=1, seconds=1),
    Sample(group='c', key='x', amount=1, seconds=1),
  ]
  (ratio,) = run_comparison.compare(first, second)
  assert [*ratio.values()] == ['a', 1, 2, None, None]


def test_a_page_has_everything_and_fetches_nothing(tmp_path):
  folders = [
    result_folder.read(benchmark(tmp_path / name, factor))
    for name, factor in (('old', 2), ('new', 3))
  ]
  ratios = run_comparison.compare(*(folder.samples for folder in folders))
  assert {r['what']: r['speed ratio'] for r in ratios} == pytest.approx(
    {'autoregressive': 1, 'auto': 1.5}
  )
  page = Page(report_page.render(folders, ratios))
  links = page.values('src', 'href', 'xlink:href')
  assert all(link.startswith(('data:', '#')) for link in links)
  tags = [tag for tag, _ in page.elements]
  assert tags.count('svg') == 3  # the ratios, and a speed for each folder
  assert {'1.5', '<b>', 'A&B', 'python -m x'} <= set(page.texts)


def test_the_program(tmp_path):
  old, new = (benchmark(tmp_path / name, 2) for name in ('old', 'new'))
  output = tmp_path / 'report.html'
  programs.output_of(
    'report', str(old), str(new), '--compare', f'--output={output}'
  )
  assert 'speed ratio' in output.read_text()
  message = programs.error_of('report', str(old), '--compare', '--output=x')
  assert '--compare takes two folders, not 1' in message
