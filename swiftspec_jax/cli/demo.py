"""Shows speculative decoding: the same answers, plainly and faster.

  swiftspec demo
  swiftspec demo --target=qwen2.5-coder-1.5b-instruct

Downloads a model once and answers four prompts, plainly and with speculation,
side by side. Takes a minute or two on two CPU cores with the small model.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from absl import flags
from rich import box, console, live, panel, status, table, text

import swiftspec_jax as ss
from swiftspec_jax import tokenizer as tokenizer_lib
from swiftspec_jax.cli import program
from swiftspec_jax.requests import results

_TARGET = flags.DEFINE_string(
  'target', 'smollm2-135m-instruct', 'Model that answers.'
)
_SAMPLING = ss.SamplingParams(max_new_tokens=96)
# From these on speculation is called faster or slower.
_FASTER, _SLOWER = 1.05, 0.95
_PLAIN, _AUTO = 'plain', 'auto'
_FRAME_SECONDS = 0.1  # drawing must not slow the decoding

# 65 to 129 tokens each, with the template: one size of prompts is compiled.
_PROMPTS = {
  'question': 'Why is the sky blue? Answer in three sentences, as a teacher '
  'who has a class of curious children, and say in the last one why the sky is '
  'red in the evening.',
  'summary': """Write a summary in two sentences:

The old lighthouse stands on a rocky island, two miles from the harbour. It
was built in 1874 and has been automatic since 1982. Visitors can reach the
island by boat from April to October. The last keeper, who lived in the
lighthouse for thirty years, now tells visitors about his life on the rocky
island.""",
  'code': """There is a bug in this Python code. Write out the corrected code:

def mean(values):
  total = 0.0
  for value in values:
    total = value
  return total / len(values)""",
  'edit': """Correct the spelling of this text, and write it out again:

Our bakery opens at six in the moring, from Tuesday to Sunday. The bread is made
by hand and baked in a stone ofen from 1921. On Saturdays there are also cakes
with apples from our own gardin. Whoever brings a bag of their own gets a small
dicount, and all children get a biscuit.""",
}
_NEXT = """What to try next, with .venv/bin/ in front:
  swiftspec chat                a conversation, with the speed of each answer
  pip install -e '.[serve]' && .venv/bin/swiftspec serve --mode=serial
                                and open http://localhost:8000: see the trees of
                                guessed tokens
  swiftspec benchmark --help    your own prompts, models and modes
  swiftspec doctor              what this machine has
docs/index.md says how it works."""

# Seconds since the start, and the text that there was.
_Track = list[tuple[float, str]]


def main() -> None:
  """Runs the demonstration."""
  screen = console.Console()
  screen.print(f'Loading {_TARGET.value} (the first time it is downloaded)...')
  model = ss.load(_TARGET.value)
  plain = ss.Decoder(model)
  # Prompt lookup, as far as it is faster on this machine and in this text.
  auto = ss.Decoder(model, ss.PromptLookup(), policy='goodput')
  answers = {_PLAIN: [], _AUTO: []}
  token_ids = {
    name: tuple(tokenizer_lib.encode_prompt(model.tokenizer, prompt))
    for name, prompt in _PROMPTS.items()
  }
  longest = max(map(len, token_ids.values())) + _SAMPLING.max_new_tokens
  with status.Status('compiling...', console=screen):
    for decoder in (plain, auto):
      decoder.warmup(longest)
  for name, prompt in _PROMPTS.items():
    request = ss.Request(token_ids=token_ids[name], sampling=_SAMPLING)
    screen.rule(name)
    screen.print(text.Text(prompt, 'dim'))
    first, second = _race(screen, plain, auto, request)
    answers[_PLAIN].append(first)
    answers[_AUTO].append(second)
  screen.print(_table(answers))
  screen.print(_verdict(answers), highlight=False)
  screen.print(f'\n{_NEXT}', highlight=False, markup=False)


def _race(
  screen: console.Console,
  plain: ss.Decoder,
  auto: ss.Decoder,
  request: ss.Request,
) -> tuple[ss.GenerationResult, ss.GenerationResult]:
  """Decodes one after the other; beside the second the first is replayed."""
  with live.Live(
    console=screen, auto_refresh=False, vertical_overflow='visible'
  ) as display:

    def show(*texts: str) -> None:
      display.update(_side_by_side(*texts), refresh=True)

    first, track = _decode(plain, request, lambda _, now: show(now, ''))
    second, _ = _decode(
      auto, request, lambda seconds, now: show(_at(track, seconds), now)
    )
  return first, second


def _decode(
  decoder: ss.Decoder,
  request: ss.Request,
  show: Callable[[float, str], None],
) -> tuple[ss.GenerationResult, _Track]:
  """Returns the answer and when its text came; `show` gets both meanwhile."""
  start = shown = time.perf_counter()
  so_far, track = '', []
  for event in decoder.run([request]):
    now = time.perf_counter()
    so_far += event.text
    track.append((now - start, so_far))
    if event.result is not None or now - shown > _FRAME_SECONDS:
      show(*track[-1])
      shown = now
  return event.result, track


def _at(track: _Track, seconds: float) -> str:
  """Returns the text that there was after some seconds."""
  return next((t for when, t in reversed(track) if when <= seconds), '')


def _side_by_side(plain: str, auto: str) -> table.Table:
  grid = table.Table.grid(expand=True)
  grid.add_column(ratio=1)
  grid.add_column(ratio=1)
  grid.add_row(
    panel.Panel(text.Text(plain), title='plain decoding, by then'),
    panel.Panel(text.Text(auto), title=_AUTO, border_style='green'),
  )
  return grid


def _table(answers: Mapping[str, Sequence[ss.GenerationResult]]) -> table.Table:
  """Tokens per second of each way to decode, for each prompt and for all."""
  plain = answers[_PLAIN]
  found = table.Table(
    title='tokens a second', box=box.SIMPLE, padding=(0, 1, 0, 0)
  )
  found.add_column()
  for name in (*_PROMPTS, 'all', 'speedup', 'a round', 'equal'):
    found.add_column(name, justify='right')
  for name, way in answers.items():
    speeds = [_speed([answer]) for answer in way] + [_speed(way)]
    length = results.total_acceptance_length([r.stats for r in way])
    found.add_row(
      name,
      *(f'{speed:.1f}' for speed in speeds),
      f'{speeds[-1] / _speed(plain):.2f}x',
      f'{length:.2f}',
      _identical(plain, way),
    )
  return found


def _speed(answers: Sequence[ss.GenerationResult]) -> float:
  """Tokens per second."""
  num_tokens = sum(answer.stats.decoded_tokens for answer in answers)
  return num_tokens / sum(answer.stats.decode_seconds for answer in answers)


def _identical(
  first: Sequence[ss.GenerationResult], second: Sequence[ss.GenerationResult]
) -> str:
  pairs = zip(first, second, strict=True)
  return 'yes' if all(a.token_ids == b.token_ids for a, b in pairs) else 'NO'


def _verdict(answers: Mapping[str, Sequence[ss.GenerationResult]]) -> str:
  speedup = _speed(answers[_AUTO]) / _speed(answers[_PLAIN])
  if speedup >= _FASTER:
    first = 'Speculation was faster here.'
  elif speedup < _SLOWER:
    first = 'Speculation was slower here.'
  else:
    first = 'Speculation made no difference here.'
  return (
    f'{first} A round is one run of the model; it checks all tokens that '
    'were guessed. On a CPU it takes longer, the more tokens it checks. A '
    'small model makes mistakes, and speculation must make the same ones.'
  )


if __name__ == '__main__':
  program.run(main)
