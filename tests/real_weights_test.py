"""Greedy tokens of the built-in models against those of transformers."""

import json
import pathlib

import model_cases
import pytest
from absl import logging

import swiftspec_jax as ss

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name('golden').joinpath('models.json').read_text()
)
# Two implementations may choose differently between logits this close.
TIE = 1e-4


def check(name, prompts, **options):
  """Compares with what transformers made of the prompts."""
  results = ss.generate(
    ss.load(name),
    prompts,
    max_new_tokens=model_cases.NUM_NEW_TOKENS,
    **options,
  )
  num_ties = 0
  for result, golden in zip(results, GOLDEN[name], strict=True):
    assert result.stats.prompt_tokens == len(golden['prompt_ids'])
    expected = tuple(golden['token_ids'])
    if result.token_ids == expected:
      continue
    pairs = zip(result.token_ids, expected, strict=False)
    step = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
    gap = golden['gaps'].get(str(step), float('inf'))
    assert gap < TIE, f'token {step} differs: {result.text!r}'
    num_ties += 1
    logging.warning('A tie of %s at token %s of %r', gap, step, result.text)
  logging.warning('%s: %d prompts, %d ties', name, len(results), num_ties)


@pytest.mark.parametrize('batch_size', [1, 6])
def test_smollm2_decodes_as_transformers_does(batch_size):
  check(
    'smollm2-135m-instruct', model_cases.CHAT_PROMPTS, batch_size=batch_size
  )


@pytest.mark.gemma
def test_gemma_decodes_as_transformers_does():
  check('gemma-3-270m', model_cases.PLAIN_PROMPTS)
