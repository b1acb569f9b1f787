"""Engines that rate prompts between their steps."""

import numpy as np
import pytest
import server_cases

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.engine.engine import Engine
from swiftspec_jax.engine.handles import EngineError
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.step.program_sizes import ProgramSizes

LOG = np.log(server_cases.TABLE)


def make_rows():
  sizes = StepBuckets(rows=(1,), query_tokens=(1, 32))
  return Engine(server_cases.MODEL, sizes=ProgramSizes.of_rows(sizes, 600))


@pytest.mark.parametrize('has_pages', [False, True])
def test_one_prompt_between_two_steps(has_pages):
  engine = server_cases.make_service().engine if has_pages else make_rows()
  prompts = [(0, 1, 2), (4, 6), (3,), tuple([5, 1] * 290)]
  scores = [engine.score(ss.Request(token_ids=prompt)) for prompt in prompts]
  scores[1].cancel()
  for num_done in (2, 3, 4):  # with the second, which nobody reads
    engine.step()
    assert sum(score.done() for score in scores) == num_done
  for prompt, score in zip(prompts, scores, strict=True):
    if score.cancelled():
      continue
    rated, rows = score.result(), LOG[list(prompt[:-1])]
    expected = LOG[prompt[:-1], prompt[1:]]
    np.testing.assert_allclose(rated.chosen, expected, atol=1e-5)
    assert rated.top.shape == (len(prompt) - 1, 8)
    np.testing.assert_allclose(rated.top, -np.sort(-rows), atol=1e-5)
    np.testing.assert_array_equal(rated.top_token_ids, np.argsort(-rows))


def test_prompts_that_are_not_rated():
  engine = make_rows()
  with pytest.raises(errors.UserError, match='takes at most 600 tokens'):
    engine.score(ss.Request(token_ids=(0,) * 600))
  score = engine.score(ss.Request(token_ids=(0, 1)))
  engine.fail(ValueError('a step'))
  later = engine.score(ss.Request(token_ids=(0, 1)))
  for found in (score, later):
    with pytest.raises(EngineError, match='the engine has failed'):
      found.result()
  engine = make_rows()
  score = engine.score(ss.Request(token_ids=(0, 1)))
  engine.cancel_all()
  assert score.cancelled()
