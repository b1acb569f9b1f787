"""The program that shows what a server learns from its own outputs."""

import json

import programs


def test_repeated_requests_are_drafted(model, tmp_path):
  """Greedy answers are the same each time, so the second time all is known."""
  prompts = tmp_path / 'prompts.jsonl'
  lines = [
    json.dumps({'question_id': i, 'task': 'a', 'turns': [text]})
    for i, text in enumerate(('What is rain?', 'Why is the sky blue?'))
  ]
  prompts.write_text('\n'.join(lines))
  directory = tmp_path / 'curve'
  output = programs.output_of(
    'studies.learning_curve',
    f'--target={model}',
    f'--prompts={prompts}',
    '--repeats=2',
    '--max_new_tokens=20',
    '--batch_size=2',
    f'--output_dir={directory}',
  )
  rows = programs.read_lines(directory)
  assert [row['num_served'] for row in rows] == [0, 2]
  assert rows[1]['forgets'] == rows[0]['forgets']
  assert rows[1]['learns'] > rows[0]['learns'] >= 1
  assert f'{rows[1]["learns"]:.2f}' in output
  assert (directory / 'provenance.json').exists()
