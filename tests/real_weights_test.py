"""Greedy tokens of the built-in models against those of transformers."""

import functools
import pathlib

import model_cases
import numpy as np
import pytest
from absl import logging
from models_test import chain

import swiftspec_jax as ss

GOLDEN = model_cases.golden()
# Two implementations may choose differently between logits this close.
TIE = 1e-4


load = functools.cache(functools.partial(ss.load, weight_dtype='wide'))


def check(name, prompts, max_new_tokens, **options):
  """Compares with what transformers made of the first prompts."""
  results = ss.generate(
    load(name), prompts, max_new_tokens=max_new_tokens, **options
  )
  num_ties = 0
  expected_results = GOLDEN[name][: len(prompts)]
  for result, golden in zip(results, expected_results, strict=True):
    assert result.stats.prompt_tokens == len(golden['prompt_ids'])
    expected = tuple(golden['token_ids'][:max_new_tokens])
    if result.token_ids == expected:
      continue
    pairs = zip(result.token_ids, expected, strict=False)
    step = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
    gap = golden['gaps'].get(str(step), float('inf'))
    assert gap < TIE, f'token {step} differs: {result.text!r}'
    num_ties += 1
    logging.warning('A tie of %s at token %s of %r', gap, step, result.text)
  logging.warning('%s: %d prompts, %d ties', name, len(results), num_ties)


def test_smollm2_decodes_as_transformers_does():
  prompts = model_cases.CHAT_PROMPTS[:6]
  check('smollm2-135m-instruct', prompts, max_new_tokens=64, batch_size=6)


def test_smollm2_ends_where_llama_cpp_ends_it():
  model = load('smollm2-135m-instruct')
  ends = model.tokenizer.convert_ids_to_tokens(model.config.eos_token_ids)
  # As xllamacpp 2026.10 prints them.
  assert set(ends) == {'<|im_end|>', '<|endoftext|>', '<reponame>'}


@pytest.mark.gemma
def test_gemma_decodes_as_transformers_does():
  check('gemma-3-270m', model_cases.PLAIN_PROMPTS, max_new_tokens=64)


def has_bfloat16_instructions():
  path = pathlib.Path('/proc/cpuinfo')
  return path.exists() and 'avx512_bf16' in path.read_text()


@pytest.mark.optimised
@pytest.mark.skipif(
  not has_bfloat16_instructions(), reason='products in bfloat16 differ then'
)
def test_steps_of_all_sizes_give_the_same_bits_in_bfloat16():
  """So chains decide near ties as plain decoding does."""
  # The other layers have the same sizes.
  target = ss.load('smollm2-135m-instruct', dtype='bfloat16', num_layers=10)
  text = ' '.join(model_cases.CHAT_PROMPTS)
  token_ids = np.array(target.tokenizer.encode(text), np.int32)[:40]
  expected = chain(target, 1, token_ids)
  for step_size in (4, 5, 8):
    found = chain(target, step_size, token_ids)
    np.testing.assert_array_equal(found, expected)
