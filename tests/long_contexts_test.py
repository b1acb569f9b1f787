"""The program that counts how often a target is right over sparse caches."""

import json

import programs
import pytest

TEXTS = f'--texts={programs.ROOT}/README.md'


@pytest.mark.ci
def test_program(model, tmp_path):
  status, output, complaints = programs.run(
    'long_contexts',
    f'--target={model}',
    TEXTS,
    '--prompt_tokens=256',
    '--num_texts=1',
    '--budgets=64',
    '--max_new_tokens=24',
    '--num_speculative_tokens=3',
    f'--output_dir={tmp_path}',
  )
  assert status == 0, complaints
  lines = (tmp_path / 'rows.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [(row['draft'], row['task']) for row in rows] == [
    ('window', 'continue'),
    ('window', 'recall'),
    ('snapkv', 'continue'),
    ('snapkv', 'recall'),
  ]
  for row in rows:
    assert row['outputs_equal']
    assert 0 <= row['num_accepted'] <= row['num_drafted']
    assert f'{row["acceptance_length"]:.2f}' in output
  assert (tmp_path / 'provenance.json').exists()


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
    'long_contexts', TEXTS, *flags, f'--output_dir={tmp_path}'
  )
  assert message in found
