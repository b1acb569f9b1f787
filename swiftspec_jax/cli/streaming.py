"""Shows an answer while it is decoded, and how fast it was."""

from collections.abc import Sequence

import swiftspec_jax as ss
from swiftspec_jax.requests import results


def show(decoder: ss.Decoder, request: ss.Request) -> ss.GenerationResult:
  """Decodes `request`; its text appears on standard output as it comes."""
  for event in decoder.run([request]):
    print(event.text, end='', flush=True)
  print()
  return event.result


def describe(
  stats: Sequence[ss.GenerationStats], *, has_details: bool = False
) -> str:
  """Returns a line about one or more requests.

  It has their tokens, the seconds that they took, and the rate of decoding,
  without prompts and compilation, if there is one.

  Args:
    stats: statistics of each request.
    has_details: whether the other figures are there, too.
  """
  new_tokens = sum(s.new_tokens for s in stats)
  seconds = sum(s.latency_seconds for s in stats)
  parts = [f'{new_tokens} tokens in {seconds:.2f} s']
  if decoded := sum(s.decoded_tokens for s in stats):
    rate = decoded / sum(s.decode_seconds for s in stats)
    parts.append(f'decoded at {rate:.1f} tokens/s')
  if has_details:
    parts += _details(stats)
  return ', '.join(parts)


def _details(stats: Sequence[ss.GenerationStats]) -> list[str]:
  ttft = sum(s.ttft_seconds for s in stats) / len(stats)
  parts = [
    f'time to first token {ttft:.2f} s',
    f'acceptance length {results.total_acceptance_length(stats):.2f}',
  ]
  at_positions = results.rate_per_position(stats)
  if any(rate is not None for rate in at_positions):
    shares = ' '.join(f'{rate or 0:.2f}' for rate in at_positions)
    parts.append(f'accepted per position {shares}')
  parts += _choices(stats)
  rates = results.tree_rates(stats)
  if None not in rates.values():
    names = ('hits', 'late hits', 'misses')
    rounded = [f'{rate:.2f}' for rate in rates.values()]
    parts += map(' '.join, zip(names, rounded, strict=True))
  return parts


def _choices(stats: Sequence[ss.GenerationStats]) -> list[str]:
  """Returns which kinds of rounds there were, if there was a choice."""
  num_rounds = sum(s.num_rounds for s in stats)
  num_plain = sum(s.num_plain_rounds for s in stats)
  num_tree = sum(s.num_tree_rounds for s in stats)
  counts = {
    'plain': num_plain,
    'chain': num_rounds - num_plain - num_tree,
    'tree': num_tree,
  }
  used = [f'{count} {kind}' for kind, count in counts.items() if count]
  return [f'rounds {", ".join(used)}'] if len(used) > 1 else []
