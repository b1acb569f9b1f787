"""What quantized weights cost, and the rating that says so."""

import numpy as np
import programs
import pytest

import swiftspec_jax as ss
from swiftspec_jax.config import STORED, WEIGHT_DTYPES
from swiftspec_jax.engine import scoring


def test_score_is_what_decoding_says(model):
  target = ss.load(model)
  prompt = tuple(range(250)) + tuple(range(50))  # over a block of logits
  (result,) = ss.generate(
    target,
    [prompt],
    sampling=ss.SamplingParams(
      max_new_tokens=12, logprobs=True, forced_token_ids=(7, 200, 31)
    ),
  )
  token_ids = (*prompt, *result.token_ids)
  rated = scoring.score(target, token_ids, len(prompt), num_top=2)
  np.testing.assert_allclose(rated.chosen, result.logprobs, atol=1e-4)
  best = rated.top_token_ids[:, 0]
  assert best[3:].tolist() == list(result.token_ids[3:])
  # The best one is the chosen one, to the bit.
  assert rated.top[3:, 0].tolist() == rated.chosen[3:].tolist()
  assert rated.top.shape == (12, 2)


@pytest.mark.ci
def test_report(model, tmp_path):
  prompts = programs.write_prompts(tmp_path, 'What is rain?', 'Name a tree.')
  output = programs.output_of(
    'studies.evaluate_weights',
    f'--target={model}',
    f'--prompts={prompts}',
    '--max_new_tokens=16',
    f'--output_dir={tmp_path / "results"}',
  )
  summary = programs.read_summary(tmp_path / 'results')
  assert summary['num_prompts'] == 2
  weights = summary['weights']
  kinds = [kind for kind in WEIGHT_DTYPES if kind not in ('mxfp4', STORED)]
  assert list(weights) == ['plain', *kinds]
  assert [line.split()[0] for line in output.splitlines()[2:8]] == list(weights)
  plain, int8, int4, _, int8_dynamic, _ = weights.values()
  assert plain['equal_tokens'] == 1
  assert plain['perplexity_increase'] == 0
  assert abs(int8['perplexity_increase']) < abs(int4['perplexity_increase'])
  assert 0 < int4['equal_tokens'] <= int8['equal_tokens'] <= 1
  assert int4['num_bytes'] < int8['num_bytes'] < plain['num_bytes']
  # Its table is quantized, too.
  assert int8_dynamic['num_bytes'] < int8['num_bytes']
  assert summary['provenance']['flags']['weight_dtypes'] == kinds
  assert summary['provenance']['flags']['weight_dtype'] is None


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--weight_dtype=int8', '--weight_dtype has no meaning here'),
    ('--weight_dtypes=int8,fp8', "--weight_dtypes: unknown name 'fp8'"),
    ('--temperature=1', '--temperature=1.0 has no meaning here'),
  ],
)
def test_what_is_refused(tmp_path, flag, message):
  error = programs.error_of(
    'studies.evaluate_weights', f'--output_dir={tmp_path}', flag
  )
  assert message in error
