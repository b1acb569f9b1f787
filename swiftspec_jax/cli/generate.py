"""Continues prompts, or talks with you.

  swiftspec generate --prompt='Why is the sky blue?'
  swiftspec generate --mode=prompt_lookup --prompt_file=note.txt
  swiftspec generate --mode=async --draft=DRAFT --prompt='Hello!'
  swiftspec generate

--prompt_file is one prompt as plain text or, if it ends in .jsonl, many. The
text goes to standard output, the speed to standard error. Without a prompt
you get a conversation. On a CPU, mode async splits it into devices.
"""

import pathlib
import sys

import jax
from absl import flags

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cli import (
  chat,
  output_files,
  program,
  references,
  streaming,
  tracing,
)
from swiftspec_jax.cli import prompts as prompts_lib
from swiftspec_jax.cli.flags import (
  config_file,
  device_flags,
  host_flags,
  modes,
  policy_flags,
  shared_flags,
  tree_flags,
)
from swiftspec_jax.runtime import hosts, input_files
from swiftspec_jax.runtime import timeline as timeline_lib

_MODE = flags.DEFINE_enum(
  'mode',
  modes.AUTO,
  modes.DECODING,
  'How to decode. auto chooses round by round among plain decoding, prompt '
  'lookup and trees of the draft model, if there is one, by what it measures. '
  f'{", ".join(modes.where(lambda mode: mode.decodes and mode.is_paged))} '
  'decode over pages, as in serve.',
)
_PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue.')
_PROMPT_FILE = flags.DEFINE_string(
  'prompt_file', None, 'File with a prompt, or with many if it is .jsonl.'
)
_SYSTEM = flags.DEFINE_string(
  'system', None, 'System prompt, for models that chat.'
)
_STATS = flags.DEFINE_bool(
  'stats',
  False,
  'Say more after each answer: time to the first token, acceptance, and what '
  'kinds of rounds there were.',
)
_TRACE_DIR = flags.DEFINE_string(
  'trace_dir',
  None,
  'Modes serial and async: where timeline.json, for ui.perfetto.dev, its '
  'summary and a trace of jax.profiler go, all of the first prompt.',
)


def main() -> None:
  """Runs the program."""
  config_file.apply()
  host_flags.initialize()
  device_flags.spread([_MODE.value])
  shared_flags.check([_MODE.value])
  policy_flags.check([_MODE.value])
  prompts = _read_prompts()
  _check_studies(prompts)
  shared_flags.compare_files([_MODE.value], _PROMPT_FILE.value)
  target = shared_flags.load_target()
  draft = shared_flags.load_drafts(target, [_MODE.value]).get(_MODE.value)
  timeline = ss.Timeline() if _TRACE_DIR.value else None
  decoder = shared_flags.make_decoder(
    _MODE.value,
    target,
    draft,
    policy=policy_flags.make(_MODE.value),
    timeline=timeline,
  )
  if prompts is None:
    chat.run(
      target,
      decoder,
      shared_flags.sampling(),
      system=_SYSTEM.value,
      has_details=_STATS.value,
    )
    return
  requests = _requests(target, [prompt for _, prompt in prompts])
  forced = tree_flags.config().forced_acceptance
  remark = '' if forced is None else f'forced acceptance {forced:g}: '
  stats, traced = [], None
  print('compiling...', file=sys.stderr, flush=True)
  for (title, _), request in zip(prompts, requests, strict=True):
    if title:
      print(f'[{title}]')
    if timeline and not traced:
      limit = request.sampling.max_new_tokens or decoder.max_context
      decoder.warmup(len(request.token_ids) + limit, request.sampling)
      traced = _trace(timeline, decoder, request)
      result = traced.result
    else:
      result = streaming.show(decoder, request)
    stats.append(result.stats)
    _tell(remark, [result.stats])
  if len(stats) > 1:
    _tell(f'all, {remark}', stats)
  if traced:
    _report(traced)


def _tell(remark: str, stats: list[ss.GenerationStats]) -> None:
  """Says how fast it was."""
  line = streaming.describe(stats, has_details=_STATS.value)
  print(f'{remark}{line}', file=sys.stderr)


def _check_studies(prompts: list[tuple[str, str]] | None) -> None:
  """Raises UserError for flags that this mode, or a chat, cannot have."""
  if _TRACE_DIR.value and _MODE.value not in modes.PERSISTENT_TREES:
    raise errors.UserError(
      f'--trace_dir={_TRACE_DIR.value} is for modes '
      f'{", ".join(modes.PERSISTENT_TREES)}; the mode is {_MODE.value}'
    )
  if _TRACE_DIR.value and policy_flags.is_given():
    raise errors.UserError(
      f'--trace_dir={_TRACE_DIR.value} is for decoding without --policy'
    )
  forced = tree_flags.config().forced_acceptance
  if prompts is None and (_TRACE_DIR.value or forced is not None):
    raise errors.UserError(
      '--trace_dir and --forced_acceptance are not for a conversation: give '
      '--prompt or --prompt_file'
    )
  if hosts.is_together() and (prompts is None or _TRACE_DIR.value):
    raise errors.UserError(
      '--distributed is for --prompt and --prompt_file without --trace_dir'
    )
  if _TRACE_DIR.value:
    directory = pathlib.Path(_TRACE_DIR.value)
    with output_files.writing(directory):
      directory.mkdir(parents=True, exist_ok=True)


def _requests(target: ss.Model, prompts: list[str]) -> list[ss.Request]:
  """Returns the requests, with their references where they are needed."""
  requests = [
    ss.Request(
      token_ids=tuple(
        tokenizer_lib.encode_prompt(target.tokenizer, _with_system(prompt))
      ),
      sampling=shared_flags.sampling(),
    )
    for prompt in prompts
  ]
  if tree_flags.config().forced_acceptance is None:
    return requests
  print(
    'decoding plainly first, for --forced_acceptance...',
    file=sys.stderr,
    flush=True,
  )
  known = references.References(target)
  return [known.add_to(request) for request in requests]


def _with_system(prompt: str) -> str | list[dict[str, str]]:
  """Returns a prompt, after that of --system if there is one."""
  if _SYSTEM.value is None:
    return prompt
  return [*chat.system_messages(_SYSTEM.value), chat.message('user', prompt)]


def _trace(
  timeline: ss.Timeline, decoder: ss.Decoder, request: ss.Request
) -> tracing.Trace:
  with jax.profiler.trace(_TRACE_DIR.value):
    return tracing.trace(timeline, lambda: streaming.show(decoder, request))


def _report(traced: tracing.Trace) -> None:
  directory = pathlib.Path(_TRACE_DIR.value)
  tracing.write(directory, traced)
  print('mean round of the first prompt:', file=sys.stderr)
  print(timeline_lib.table(traced.summary), file=sys.stderr)
  print(f'written to {directory}', file=sys.stderr)


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
  return [('', input_files.read_text(path))]


if __name__ == '__main__':
  program.run(main)
