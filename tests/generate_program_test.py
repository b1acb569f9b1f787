"""The program that generates: streams, chats, and complains clearly."""

import re
import signal

import programs
import pytest

import swiftspec_jax as ss


@pytest.fixture(scope='module')
def expected(model):
  """What the library says after 'hello'."""
  (result,) = ss.generate(ss.load(model), 'hello', max_new_tokens=24)
  return result.text


def generate(model, *flags, text=''):
  return programs.run(
    'generate', f'--target={model}', '--max_new_tokens=24', *flags, text=text
  )


def test_text_and_statistics(model, expected):
  flags = '--prompt=hello', '--mode=datastore', '--policy=goodput', '--stats'
  status, output, complaints = generate(model, *flags)
  assert status == 0
  assert output == f'{expected}\n'
  last = complaints.splitlines()[-1]
  assert last.startswith('24 tokens in ')
  for part in ('tokens/s', 'time to first token', 'acceptance length'):
    assert part in last


def test_prompts_from_a_file(model, expected, tmp_path):
  path = programs.write_prompts(tmp_path, 'hello', 'hello')
  status, output, complaints = generate(model, f'--prompt_file={path}')
  assert status == 0
  assert output == f'[0]\n{expected}\n[1]\n{expected}\n'
  *first, last = complaints.splitlines()
  figures = r'{} tokens in \d+\.\d\d s, decoded at \d+\.\d tokens/s'
  assert re.fullmatch(f'all, {figures.format(48)}', last)
  assert sum(bool(re.fullmatch(figures.format(24), x)) for x in first) == 2


def test_a_system_prompt_comes_first(model, expected):
  messages = [
    {'role': 'system', 'content': 'be brief'},
    {'role': 'user', 'content': 'hello'},
  ]
  (result,) = ss.generate(ss.load(model), [messages], max_new_tokens=24)
  assert result.text != expected
  flags = '--system=be brief', '--mode=autoregressive'
  _, output, _ = generate(model, *flags, '--prompt=hello')
  assert output == f'{result.text}\n'
  _, output, _ = generate(model, *flags, text='hello\n/reset\nhello\n')
  assert output == f'> {result.text}\n> > {result.text}\n> \n'


def test_chain_from_a_plain_file(model, expected, tmp_path):
  path = tmp_path / 'prompt.txt'
  path.write_text('hello')
  status, output, complaints = generate(
    model,
    '--mode=chain',
    f'--draft={model}',
    f'--prompt_file={path}',
    '--stats',
  )
  assert status == 0
  assert output == f'{expected}\n'
  # The target drafts perfectly for itself.
  assert 'accepted per position 1.00' in complaints


def test_chat_keeps_the_conversation_until_reset(model, expected):
  """It survives a full context, and ends with its input."""
  lines = 'a' * 1100, 'hello', 'hello', '/reset', '/unknown', '', 'hello\n'
  status, output, complaints = generate(model, text='\n'.join(lines))
  assert status == 0
  assert 'error: the prompt has 11' in complaints
  assert complaints.count('tokens/s') == 3
  start, end = f'> > {expected}\n> ', f'\n> > > > {expected}\n> \n'
  assert output.startswith(start)
  assert output.endswith(end)
  assert output.removeprefix(start).removesuffix(end) != expected


def test_ctrl_c_stops_the_answer_but_not_the_chat(model):
  flags = f'--target={model}', '--max_new_tokens=900', '--mode=autoregressive'
  with programs.running('generate', *flags, text='hello\n/quit\n') as process:
    # The prompt, and the first character of the answer.
    programs.wait_for(lambda: len(process.output) >= 3)
    process.send(signal.SIGINT)
    status, output, complaints = process.finish()
  assert status == 0
  assert '[stopped]' in complaints
  assert output.endswith('> ')


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--mode=guess'], 'flag --mode=guess: value should be one of'),
    (['--target=no-model'], "error: no model 'no-model'"),
    (['--prompt_file=x'], 'error: give --prompt or --prompt_file, not both'),
    (['hello'], "error: unexpected argument 'hello'"),
  ],
)
def test_bad_flags_get_one_line(flags, message):
  assert message in programs.error_of('generate', '--prompt=hello', *flags)


def test_missing_prompt_file(model):
  error = programs.error_of('generate', '--prompt_file=/missing.txt')
  assert error == 'error: cannot read /missing.txt: No such file or directory'
