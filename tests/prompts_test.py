"""Files of prompts: the shipped one, other formats, and broken ones."""

import collections
import json

import pytest

from experiments.flags import run_flags
from swiftspec_jax import errors
from swiftspec_jax.cli import prompts


def write(path, *lines):
  texts = (x if isinstance(x, str) else json.dumps(x) for x in lines)
  path.write_text(''.join(f'{text}\n' for text in texts))
  return path


def entry(question_id, **changes):
  others = {'task': 'qa', 'turns': ['Why?'], **changes}
  return {'question_id': question_id, **others}


def test_shipped_prompts_are_ten_of_each_kind():
  found = prompts.read_prompts(run_flags.DEFAULT_PROMPTS)
  assert collections.Counter(prompt.task for prompt in found) == dict.fromkeys(
    ('chat', 'qa', 'math', 'rag', 'summarization', 'translation'), 10
  )
  assert len({prompt.turns for prompt in found}) == 60
  for prompt in found:
    num_words = len(prompt.turns[0].split())
    if prompt.task == 'rag':
      assert 150 <= num_words <= 450
    if prompt.task == 'summarization':
      assert 200 <= num_words <= 550
  # The first ones are of different kinds.
  found = prompts.read_prompts(run_flags.DEFAULT_PROMPTS, 6)
  assert len({prompt.task for prompt in found}) == 6


def test_category_stands_in_for_task(tmp_path):
  line = {'question_id': 81, 'category': 'writing', 'turns': ['a', 'b']}
  path = write(tmp_path / 'question.jsonl', line)
  assert prompts.read_prompts(path) == [
    prompts.Prompt(question_id=81, task='writing', turns=('a', 'b'))
  ]


def test_limit_and_empty_lines(tmp_path):
  path = write(tmp_path / 'p.jsonl', entry(1), '', entry(2), 'broken')
  assert [p.question_id for p in prompts.read_prompts(path, 2)] == [1, 2]


def test_tasks_take_turns():
  found = [
    prompts.Prompt(question_id=i, task=task, turns=('a',))
    for i, task in enumerate(('qa', 'qa', 'qa', 'math', 'rag', 'math'))
  ]
  chosen = prompts.of_each_task(found, 2)
  assert [p.question_id for p in chosen] == [0, 3, 4, 1, 5]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"question_id": 1', 'not valid JSON'),
    ([1], 'must be a JSON object'),
    ({'task': 'qa', 'turns': ['a']}, "'question_id' must be"),
    (entry(True), "'question_id' must be"),
    ({'question_id': 1, 'turns': ['a']}, "'task' \\(or 'category'\\) must be"),
    (entry(1, turns=[]), "'turns' must be"),
    (entry(1, turns='a'), "'turns' must be"),
    (entry(1, turns=[1]), "'turns' must be"),
    (entry(1, turns=['']), "'turns' must be"),
    (entry(3), 'question_id 3 occurs twice'),
  ],
)
def test_bad_line_is_named(tmp_path, line, message):
  good = [entry(i) for i in range(100, 115)]
  path = write(tmp_path / 'p.jsonl', entry(3), *good, line)
  with pytest.raises(errors.UserError, match=f'line 17: {message}'):
    prompts.read_prompts(path)


def test_unreadable_files(tmp_path):
  with pytest.raises(errors.UserError, match='No such file'):
    prompts.read_prompts(tmp_path / 'missing.jsonl')
  with pytest.raises(errors.UserError, match='Is a directory'):
    prompts.read_prompts(tmp_path)
  with pytest.raises(errors.UserError, match='holds no prompts'):
    prompts.read_prompts(write(tmp_path / 'empty.jsonl', ''))
  (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
  with pytest.raises(errors.UserError, match='cannot read prompts'):
    prompts.read_prompts(tmp_path / 'binary')
