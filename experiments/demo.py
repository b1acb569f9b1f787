"""Shows speculative decoding: the same answers, plainly and faster.

  python -m experiments.demo

Downloads a small model once, answers three prompts plainly and then with
speculation, and compares. Takes less than two minutes on two CPU cores.
"""

from collections.abc import Sequence

import swiftspec_jax as ss
from experiments import program, streaming
from swiftspec_jax import results
from swiftspec_jax import tokenizer as tokenizer_lib

_MODEL = 'smollm2-135m-instruct'
_DRAFT = ss.PromptLookup()
_DRAFT_NAME = 'prompt lookup'
_SAMPLING = ss.SamplingParams(max_new_tokens=96)
# From these on speculation is called faster or slower.
_FASTER, _SLOWER = 1.05, 0.95

_PROMPTS = {
  'question': 'Why is the sky blue? Answer in three sentences.',
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
}


def main() -> None:
  """Runs the demonstration."""
  print(f'Loading {_MODEL} (the first time it is downloaded)...', flush=True)
  model = ss.load(_MODEL)
  plain_decoder, draft_decoder = ss.Decoder(model), ss.Decoder(model, _DRAFT)
  plain, speculative = [], []
  for text in _PROMPTS.values():
    print(f'\n=== {text}')
    token_ids = tokenizer_lib.encode_prompt(model.tokenizer, text)
    request = ss.Request(token_ids=tuple(token_ids), sampling=_SAMPLING)
    plain.append(_show('plain decoding', plain_decoder, request))
    speculative.append(_show(_DRAFT_NAME, draft_decoder, request))
  print(f'\n{_table(plain, speculative)}\n')
  print(
    'Each round checks the tokens that were guessed in one run of the model. '
    'The acceptance\nlength says how many tokens a round gave on average. '
    'A small model makes mistakes;\nspeculation must make the same ones.'
  )


def _show(
  name: str, decoder: ss.Decoder, request: ss.Request
) -> ss.GenerationResult:
  print(f'\n--- {name} (compiling...)', flush=True)
  streaming.compile_for(decoder, request)
  return streaming.show(decoder, request)


def _table(
  plain: Sequence[ss.GenerationResult],
  speculative: Sequence[ss.GenerationResult],
) -> str:
  lines = [
    f'{"tokens/s":<10}{"plain":>7}{_DRAFT_NAME:>15}{"speedup":>9}'
    f'{"acceptance length":>19}{"identical":>11}'
  ]
  rows = [
    (name, [first], [second])
    for name, first, second in zip(_PROMPTS, plain, speculative, strict=True)
  ]
  for name, first, second in [*rows, ('all', plain, speculative)]:
    before, after = _speed(first), _speed(second)
    length = results.total_acceptance_length([r.stats for r in second])
    lines.append(
      f'{name:<10}{before:>7.1f}{after:>15.1f}{after / before:>8.2f}x'
      f'{length:>19.2f}{_identical(first, second):>11}'
      f'  {_verdict(after / before)}'
    )
  lines.insert(-1, '-' * len(lines[0]))
  return '\n'.join(lines)


def _speed(answers: Sequence[ss.GenerationResult]) -> float:
  """Tokens per second."""
  num_tokens = sum(answer.stats.new_tokens for answer in answers)
  return num_tokens / sum(answer.stats.decode_seconds for answer in answers)


def _identical(
  first: Sequence[ss.GenerationResult], second: Sequence[ss.GenerationResult]
) -> str:
  pairs = zip(first, second, strict=True)
  return 'yes' if all(a.token_ids == b.token_ids for a, b in pairs) else 'NO'


def _verdict(speedup: float) -> str:
  if speedup >= _FASTER:
    return ''
  return 'does not pay here' if speedup < _SLOWER else 'makes no difference'


if __name__ == '__main__':
  program.run(main)
