"""The program that counts how often a target is right over sparse caches."""

import programs
import pytest

TEXTS = f'--texts={programs.ROOT}/README.md'


@pytest.mark.ci
def test_program(model, tmp_path):
  flags = [
    f'--target={model}',
    TEXTS,
    '--prompt_tokens=256',
    '--num_texts=1',
    '--budgets=64',
    '--max_new_tokens=24',
    '--num_speculative_tokens=3',
    f'--output_dir={tmp_path}',
  ]
  output = programs.output_of('studies.long_contexts', *flags)
  rows = programs.read_lines(tmp_path)
  assert [(row['draft'], row['task']) for row in rows] == [
    (draft, task)
    for draft in ('plain', 'window', 'snapkv')
    for task in ('continue', 'recall')
  ]
  for row in rows:
    assert 0 <= row['num_accepted'] <= row['num_drafted']
    length = 1 + row['num_accepted'] / row['num_rounds']
    assert f'{length:.2f}' in output
    assert row['seconds'] > 0
  assert output.count('True') == len(rows)  # of outputs that are equal
  assert (tmp_path / 'provenance.json').exists()
  # Ended before its last two outputs.
  path = tmp_path / 'rows.jsonl'
  lines = path.read_text().splitlines()
  path.write_text('\n'.join(lines[:4]) + '\n')
  again = programs.output_of('studies.long_contexts', *flags, '--resume')
  assert path.read_text().splitlines()[:4] == lines[:4]
  assert [line.split()[:6] for line in again.splitlines()[1:]] == [
    line.split()[:6] for line in output.splitlines()[1:]
  ]


def test_contexts_program(model, tmp_path):
  output = programs.output_of(
    'studies.evaluate_contexts',
    f'--target={model}',
    TEXTS,
    '--num_tokens=600',
    '--span=256',
    '--rope_scaling={"rope_type": "yarn", "factor": 2}',
    f'--output_dir={tmp_path}',
  )
  rows = programs.read_lines(tmp_path)
  assert [(row['from'], row['to']) for row in rows] == [
    (0, 256),
    (256, 512),
    (512, 600),
  ]
  # Random weights know nothing of the 272 tokens.
  assert all(row['perplexity'] > 100 for row in rows)
  assert all(f'{row["perplexity"]:.2f}' in output for row in rows)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--budgets=many',), '--budgets=many must be numbers'),
    (('--budgets=8',), 'window must be at least 1'),
    (('--budgets=32',), 'budget must be more than the 32 tokens'),
  ],
)
def test_bad_flags(tmp_path, flags, message):
  found = programs.error_of(
    'studies.long_contexts', TEXTS, *flags, f'--output_dir={tmp_path}'
  )
  assert message in found
