"""Measures what grammars draft, and what they cost, on ten flat records.

  python -m experiments.studies.structured_outputs

Each record is decoded alone, twice; the second time counts.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

import numpy as np

import swiftspec_jax as ss
from experiments.flags import run_flags
from swiftspec_jax import errors, grammar, tokenizer
from swiftspec_jax.cli import program

_TARGET, _DRAFT = 'smollm2-135m-instruct', 'smollm2-135m-draft'
_RECORDS = run_flags.DEFAULT_PROMPTS.with_name('records.jsonl')
_NUM_DRAFTED = 15


def main() -> None:
  """Prints a line for each way to draft, and the costs."""
  target = ss.load(_TARGET)
  _print_compilation(target)
  decoders = dict(_decoders(target))
  for temperature in (0.0, 1.0):
    requests = list(_requests(target, temperature))
    free = [_without_grammar(request) for request in requests]
    _decode(decoders['plain'], free)
    _print('no grammar', temperature, _decode(decoders['plain'], free))
    for name, decoder in decoders.items():
      _decode(decoder, requests)  # compiles
      results = _decode(decoder, requests)
      if name == 'plain':
        texts = [result.text for result in results]
      if [result.text for result in results] != texts:
        raise errors.UserError(f'{name} has written something else')
      _print(name, temperature, results)
  _print_costs(target, requests, texts)


def _decoders(target: ss.Model) -> Iterator[tuple[str, ss.Decoder]]:
  draft = ss.TreeDraft(model=ss.load(_DRAFT, draft_of=target))
  yield 'plain', ss.Decoder(target)
  for name, drafter in (
    ('grammar', ss.GrammarDraft()),
    ('grammar+lookup', ss.Datastore()),
    ('grammar+lookup+model', draft),
  ):
    yield name, ss.Decoder(target, drafter, num_speculative_tokens=_NUM_DRAFTED)
  lookup = ss.PromptLookup(num_speculative_tokens=_NUM_DRAFTED)
  yield 'grammar+lookup, chains', ss.Decoder(target, lookup)


def _requests(target: ss.Model, temperature: float) -> Iterator[ss.Request]:
  for line in _RECORDS.read_text().splitlines():
    values = json.loads(line)
    token_ids = tokenizer.encode_prompt(target.tokenizer, values['turns'][0])
    sampling = ss.SamplingParams(
      temperature=temperature,
      seed=values['question_id'],
      structured_outputs=ss.StructuredOutputs(json=values['schema']),
    )
    yield ss.Request(token_ids=tuple(token_ids), sampling=sampling)


def _without_grammar(request: ss.Request) -> ss.Request:
  """Returns it with 40 tokens of any kind, about as many as a record has."""
  sampling = dataclasses.replace(
    request.sampling,
    structured_outputs=None,
    ignore_eos=True,
    max_new_tokens=40,
  )
  return dataclasses.replace(request, sampling=sampling)


def _decode(
  decoder: ss.Decoder, requests: Sequence[ss.Request]
) -> list[ss.GenerationResult]:
  events = [event for r in requests for event in decoder.run([r])]
  return [event.result for event in events if event.result is not None]


def _print(name: str, temperature: float, results) -> None:
  stats = [result.stats for result in results]
  num_rounds = sum(s.num_rounds for s in stats)
  seconds = sum(s.decode_seconds for s in stats)
  print(
    f'{name} at {temperature:g}: '
    f'{1 + sum(s.num_accepted for s in stats) / num_rounds:.2f} tokens a round,'
    f' {sum(s.decoded_tokens for s in stats) / seconds:.1f} tokens a second, '
    f'{1e3 * seconds / num_rounds:.1f} ms a round',
    flush=True,
  )


def _print_compilation(target: ss.Model) -> None:
  grammar.vocabulary_of(target)
  start = time.perf_counter()
  requests = list(_requests(target, 0))
  for request in requests:
    grammar.start(request.sampling.structured_outputs, target)
  seconds = time.perf_counter() - start
  print(f'compilation of a grammar: {1e3 * seconds / len(requests):.2f} ms')


def _print_costs(target: ss.Model, requests, texts: Sequence[str]) -> None:
  """Prints the times of a grammar after each token of the texts."""
  vocabulary = grammar.vocabulary_of(target)
  num_words = -(-target.config.vocab_size // 32)
  drafting, masking, num_masks = [], [], []
  for request, text in zip(requests, texts, strict=True):
    matcher = grammar.start(request.sampling.structured_outputs, target)
    for token_id in target.tokenizer.encode(text):
      start = time.perf_counter()
      draft = grammar.draft(
        matcher, [], [], _NUM_DRAFTED, vocabulary=vocabulary
      )
      middle = time.perf_counter()
      masks = np.zeros((len(draft.matchers), num_words), np.int32)
      grammar.fill_masks(masks, draft.matchers)
      drafting.append(middle - start)
      masking.append(time.perf_counter() - middle)
      num_masks.append(len(masks))
      matcher.consume_token(token_id)
  for name, values in {'draft': drafting, 'masks': masking}.items():
    print(
      f'{name}: {1e3 * np.mean(values):.2f} ms a round, '
      f'{1e3 * max(values):.2f} at most'
    )
  print(f'masks a round: {np.mean(num_masks):.1f}')


if __name__ == '__main__':
  program.run(main)
