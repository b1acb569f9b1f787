"""A conversation in the terminal."""

import contextlib
import sys
from collections.abc import Callable

import swiftspec_jax as ss
from experiments import streaming
from swiftspec_jax import errors, profiling
from swiftspec_jax import tokenizer as tokenizer_lib

with contextlib.suppress(ImportError):
  import readline  # noqa: F401, input() then edits lines and has a history

_HELP = '/reset forgets the conversation, /quit (or Ctrl-D) ends the program'


def run(
  target: ss.Model,
  make_decoder: Callable[[], ss.Decoder],
  sampling: ss.SamplingParams,
) -> None:
  """Answers the user until /quit or the end of the input.

  Ctrl-C stops an answer; what was said of it stays in the conversation.

  Args:
    target: whose chat template is used.
    make_decoder: of one request at a time.
    sampling: of every answer.

  Raises:
    UserError: the model has no chat template.
  """
  if target.tokenizer.chat_template is None:
    raise errors.UserError(
      f'{target.name} has no chat template and cannot chat; give --prompt'
    )
  print(f'{target.name}: {_HELP}', file=sys.stderr)
  messages: list[dict[str, str]] = []
  while True:
    try:
      text = input('> ').strip()
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print(f'\n{_HELP}', file=sys.stderr)
      continue
    if text == '/quit':
      return
    if text == '/reset':
      messages = []
    elif text.startswith('/'):
      print(_HELP, file=sys.stderr)
    elif text:
      asked = [*messages, {'role': 'user', 'content': text}]
      try:
        # A decoder that was interrupted may be in any state, and a new one
        # costs nothing: what it needs has been compiled.
        answer = _answer(target, make_decoder(), asked, sampling)
      except errors.UserError as error:
        print(f'error: {error}', file=sys.stderr)
        continue
      messages = [*asked, {'role': 'assistant', 'content': answer}]


def _answer(
  target: ss.Model,
  decoder: ss.Decoder,
  messages: list[dict[str, str]],
  sampling: ss.SamplingParams,
) -> str:
  """Prints the answer as it comes and returns it."""
  token_ids = tokenizer_lib.encode_prompt(target.tokenizer, messages)
  request = ss.Request(token_ids=tuple(token_ids), sampling=sampling)
  text = ''
  try:
    with profiling.count_compilations() as compilations:
      for event in decoder.run([request]):
        print(event.text, end='', flush=True)
        text += event.text
  except KeyboardInterrupt:
    print('\n[stopped]', file=sys.stderr)
    return text
  print()
  remark = ' (compilation included)' if compilations.count else ''
  print(
    f'[{streaming.describe([event.result.stats])}{remark}]', file=sys.stderr
  )
  return text
