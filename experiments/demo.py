"""Shows speculative decoding: the same answers, plainly and faster.

  python -m experiments.demo

Downloads a small model once, answers three prompts plainly and with two kinds
of speculation, and compares. Takes some minutes on two CPU cores.
"""

from collections.abc import Mapping, Sequence

import swiftspec_jax as ss
from experiments import program, streaming
from swiftspec_jax import results
from swiftspec_jax import tokenizer as tokenizer_lib

_MODEL, _DRAFT = 'smollm2-135m-instruct', 'smollm2-135m-draft'
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
  # A draft need not be exact.
  draft = ss.load(_DRAFT, draft_of=model, weight_dtype='int8_dynamic')
  decoders = {
    'plain decoding': ss.Decoder(model),
    'prompt lookup': ss.Decoder(model, ss.PromptLookup()),
    # Plain decoding, prompt lookup, or both and a draft model in one tree,
    # whichever is the fastest in this machine and text.
    'auto': ss.Decoder(model, draft, tree=ss.TreeConfig(is_adaptive=True)),
  }
  answers = {name: [] for name in decoders}
  for text in _PROMPTS.values():
    print(f'\n=== {text}')
    token_ids = tokenizer_lib.encode_prompt(model.tokenizer, text)
    request = ss.Request(token_ids=tuple(token_ids), sampling=_SAMPLING)
    for name, decoder in decoders.items():
      print(f'\n--- {name} (compiling...)', flush=True)
      streaming.compile_for(decoder, request)
      answers[name].append(streaming.show(decoder, request))
  print(f'\n{_table(answers)}\n')
  print(
    'Each round checks the tokens that were guessed in one run of the model. '
    'The acceptance\nlength says how many tokens a round gave on average. '
    'A small model makes mistakes;\nspeculation must make the same ones.'
  )


def _table(answers: Mapping[str, Sequence[ss.GenerationResult]]) -> str:
  """Tokens per second of each way to decode, for each prompt and for all."""
  plain, *_ = answers.values()
  header = ''.join(f'{name:>10}' for name in (*_PROMPTS, 'all'))
  lines = [
    f'{"tokens/s":<14}{header}{"speedup":>9}{"acceptance length":>19}'
    f'{"identical":>11}'
  ]
  for name, way in answers.items():
    speeds = [_speed([answer]) for answer in way] + [_speed(way)]
    speedup = speeds[-1] / _speed(plain)
    length = results.total_acceptance_length([r.stats for r in way])
    cells = ''.join(f'{speed:>10.1f}' for speed in speeds)
    lines.append(
      f'{name:<14}{cells}{speedup:>8.2f}x{length:>19.2f}'
      f'{_identical(plain, way):>11}'
      f'  {"" if way is plain else _verdict(speedup)}'
    )
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
