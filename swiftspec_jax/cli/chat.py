"""A conversation in the terminal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cli import streaming

with contextlib.suppress(ImportError):
  import readline  # noqa: F401, input() then edits lines and has a history

_HELP = '/reset forgets the conversation, /quit (or Ctrl-D) ends the program'


def run(
  target: ss.Model,
  decoder: ss.Decoder,
  sampling: ss.SamplingParams,
  *,
  system: str | None,
  has_details: bool,
) -> None:
  """Answers the user until /quit or the end of the input.

  Ctrl-C stops an answer; what was said of it stays in the conversation.

  Args:
    target: model whose chat template is used.
    decoder: decoder of `target`.
    sampling: sampling parameters of every answer.
    system: system prompt, if there is one.
    has_details: whether all figures are told after each answer.

  Raises:
    UserError: the model has no chat template.
  """
  if target.tokenizer.chat_template is None:
    raise errors.UserError(
      f'{target.name} has no chat template and cannot chat; give --prompt'
    )
  print(f'{target.name}: {_HELP}', file=sys.stderr)
  messages = system_messages(system)
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
      messages = system_messages(system)
    elif text.startswith('/'):
      print(_HELP, file=sys.stderr)
    elif text:
      asked = [*messages, message('user', text)]
      try:
        answer = _answer(target, decoder, asked, sampling, has_details)
      except errors.UserError as error:
        print(f'error: {error}', file=sys.stderr)
        continue
      messages = [*asked, message('assistant', answer)]


def message(role: str, content: str) -> dict[str, str]:
  """Returns a message, as chat templates take it."""
  return {'role': role, 'content': content}


def system_messages(system: str | None) -> list[dict[str, str]]:
  """Returns how a conversation begins."""
  return [] if system is None else [message('system', system)]


def _answer(
  target: ss.Model,
  decoder: ss.Decoder,
  messages: list[dict[str, str]],
  sampling: ss.SamplingParams,
  has_details: bool,
) -> str:
  """Prints the answer as it comes, and its figures; returns the answer."""
  token_ids = tokenizer_lib.encode_prompt(target.tokenizer, messages)
  request = ss.Request(token_ids=tuple(token_ids), sampling=sampling)
  text = ''
  result = None
  with (
    _postponed_interrupt() as is_stopped,
    contextlib.closing(decoder.run([request])) as events,
  ):
    for event in events:
      print(event.text, end='', flush=True)
      text += event.text
      result = event.result
      if is_stopped.is_set():
        break
  print()
  line = 'stopped'
  if result is not None:
    line = streaming.describe([result.stats], has_details=has_details)
  print(f'[{line}]', file=sys.stderr)
  return text


@contextlib.contextmanager
def _postponed_interrupt() -> Iterator[threading.Event]:
  """Sets the event at the first Ctrl-C; only a second one raises.

  An exception in the middle of a step or a compilation would leave the
  decoder, and JAX itself, in a state that nobody knows.
  """
  pressed = threading.Event()

  def note(number, frame):
    del number, frame
    pressed.set()
    signal.signal(signal.SIGINT, previous)

  previous = signal.signal(signal.SIGINT, note)
  try:
    yield pressed
  finally:
    signal.signal(signal.SIGINT, previous)
