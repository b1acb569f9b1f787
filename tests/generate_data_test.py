import json

import programs
import pytest

from swiftspec_jax.distillation import shards


@pytest.fixture
def documents(tmp_path):
  lines = (
    f'Part {i} is fixed with {i * i} bolts and a nut.' for i in range(900)
  )
  (tmp_path / 'manual.txt').write_text('\n'.join(lines))
  return f'--documents={tmp_path}/*.txt'


def test_data_are_written_and_kept(model, documents, tmp_path):
  prompts = tmp_path / 'mine.jsonl'
  prompts.write_text(json.dumps({'prompt': 'Who are you?'}) + '\n')
  flags = (
    f'--target={model}',
    f'--output_dir={tmp_path / "data"}',
    documents,
    f'--prompts={prompts}',
    '--num_tokens=10',
    '--top_logprobs=4',
    '--feature_layers=0,1',
  )
  output = programs.output_of('generate_data', *flags)
  assert 'own' in output
  (path,) = (tmp_path / 'data').iterdir()
  groups, _ = shards.read_shard(path)
  for part in (groups[0], *groups[0].samples):
    assert part.features.shape == (len(part.token_ids), 2 * 32)
    assert part.features.any(axis=1).all()
  changed = path.stat().st_mtime_ns
  assert programs.run('generate_data', *flags)[:2] == (0, output)
  assert path.stat().st_mtime_ns == changed


def test_bad_input_is_one_line(model, documents, tmp_path):
  prompts = tmp_path / 'mine.jsonl'
  prompts.write_text('{"prompt": ""}\n')
  bare = tmp_path / 'bare'
  bare.mkdir()
  for file in model.iterdir():
    if file.name != 'chat_template.jinja':
      (bare / file.name).write_bytes(file.read_bytes())
  start = ('generate_data', f'--output_dir={tmp_path / "data"}')
  for flags, message in (
    ((f'--target={model}', f'--prompts={prompts}'), 'mine.jsonl, line 1'),
    ((f'--target={model}', '--documents=/nowhere/*'), 'matches no file'),
    ((f'--target={bare}', documents), 'no chat template'),
    (
      (f'--target={model}', documents, '--feature_layers=7'),
      'feature_layers names layer 7; the model has layers 0 to',
    ),
    (
      (f'--target={model}', documents, '--feature_layers=-1'),
      '--feature_layers=-1 must be layer numbers',
    ),
  ):
    assert message in programs.error_of(*start, *flags)
