"""Continues prompts, or talks with you.

  python -m experiments.generate --prompt='Why is the sky blue?'
  python -m experiments.generate --mode=prompt_lookup --prompt_file=note.txt
  python -m experiments.generate

--prompt_file is one prompt as plain text or, if it ends in .jsonl, many. The
text goes to standard output, the speed to standard error. Without a prompt
you get a conversation.
"""

import pathlib
import sys

from absl import flags

import swiftspec_jax as ss
from experiments import chat, program, streaming
from experiments import flags as flags_lib
from experiments import prompts as prompts_lib
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib

_MODE = flags.DEFINE_enum(
  'mode', 'autoregressive', flags_lib.MODES, 'How to decode.'
)
_PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue.')
_PROMPT_FILE = flags.DEFINE_string(
  'prompt_file', None, 'File with a prompt, or with many if it is .jsonl.'
)


def main() -> None:
  """Runs the program."""
  flags_lib.check([_MODE.value])
  prompts = _read_prompts()
  target = flags_lib.load_target()
  draft = flags_lib.load_draft(target)
  decoder = flags_lib.make_decoder(_MODE.value, target, draft)
  if prompts is None:
    chat.run(target, decoder, flags_lib.sampling())
    return
  stats = []
  for title, prompt in prompts:
    token_ids = tokenizer_lib.encode_prompt(target.tokenizer, prompt)
    request = ss.Request(
      token_ids=tuple(token_ids), sampling=flags_lib.sampling()
    )
    print('compiling...', file=sys.stderr, flush=True)
    streaming.compile_for(decoder, request)
    if title:
      print(f'[{title}]')
    stats.append(streaming.show(decoder, request).stats)
  print(streaming.describe(stats), file=sys.stderr)


def _read_prompts() -> list[tuple[str, str]] | None:
  """Returns titles, where there are many, and prompts; None for a chat."""
  if _PROMPT.value is not None and _PROMPT_FILE.value is not None:
    raise errors.UserError('give --prompt or --prompt_file, not both')
  if _PROMPT.value is not None:
    return [('', _PROMPT.value)]
  if _PROMPT_FILE.value is None:
    return None
  path = pathlib.Path(_PROMPT_FILE.value)
  if path.suffix == '.jsonl':
    prompts = prompts_lib.read_prompts(path)
    return [(str(prompt.question_id), prompt.turns[0]) for prompt in prompts]
  try:
    return [('', path.read_text(encoding='utf-8'))]
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise errors.UserError(f'cannot read {path}: {reason}') from error


if __name__ == '__main__':
  program.run(main)
