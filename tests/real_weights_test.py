"""Greedy tokens of the built-in models against those of transformers."""

import json
import pathlib

import jax
import model_cases
import pytest
from absl import logging

import swiftspec_jax as ss
from swiftspec_jax import results

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name('golden').joinpath('models.json').read_text()
)
# Two implementations may choose differently between logits this close.
TIE = 1e-4


def check(name, prompts, **options):
  """Compares with what transformers made of the prompts."""
  ours = ss.generate(
    ss.load(name),
    prompts,
    max_new_tokens=model_cases.NUM_NEW_TOKENS,
    **options,
  )
  num_ties = 0
  for result, golden in zip(ours, GOLDEN[name], strict=True):
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
  logging.warning('%s: %d prompts, %d ties', name, len(ours), num_ties)


@pytest.mark.parametrize('batch_size', [1, 6])
def test_smollm2_decodes_as_transformers_does(batch_size):
  check(
    'smollm2-135m-instruct', model_cases.CHAT_PROMPTS, batch_size=batch_size
  )


@pytest.mark.gemma
def test_gemma_decodes_as_transformers_does():
  check('gemma-3-270m', model_cases.PLAIN_PROMPTS)


@pytest.mark.parametrize('devices', [(0, 0), (0, 1)], ids=['serial', 'async'])
def test_the_built_in_draft_is_exact_and_useful(devices):
  first, second = (jax.devices()[i : i + 1] for i in devices)
  target = ss.load('smollm2-135m-instruct', devices=first)
  draft = ss.load('smollm2-135m-draft', devices=second, draft_of=target)
  tree = ss.TreeConfig(prompt_lookup=True)
  prompts = model_cases.CHAT_PROMPTS[:3]
  plain = ss.generate(target, prompts, max_new_tokens=48)
  ours = ss.generate(target, prompts, max_new_tokens=48, draft=draft, tree=tree)
  assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
  stats = [result.stats for result in ours]
  assert results.total_acceptance_length(stats) > 1.5


def test_the_built_in_draft_belongs_to_its_target():
  with pytest.raises(ss.UserError, match='is a draft of smollm2-135m-instruct'):
    ss.load('smollm2-135m-draft')
