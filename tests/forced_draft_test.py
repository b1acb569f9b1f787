"""Drafts that are right with a given probability; item 39 of the checklist."""

import engine_cases as cases
import numpy as np
import pytest

import swiftspec_jax as ss
from swiftspec_jax import errors
from swiftspec_jax.drafters.forced_draft import ForcedDraft
from swiftspec_jax.policies.fixed_length import FixedLength

PROMPTS = [(i, 3, 5) for i in range(1, 7)]


def serve(engine):
  """Outputs of all prompts, and accepted over tried draft tokens."""
  sampling = ss.SamplingParams(max_new_tokens=60, ignore_eos=True)
  handles = [
    engine.submit(ss.Request(token_ids=prompt, sampling=sampling))
    for prompt in PROMPTS
  ]
  accepted, tried = 0, 0
  while engine.num_requests:
    record = engine.step()
    lengths = record.lengths
    accepted += record.num_accepted.sum()
    tried += np.minimum(record.num_accepted + 1, lengths).sum()
  outputs = [handle.result().token_ids for handle in handles]
  return outputs, accepted / tried if tried else None


@pytest.mark.parametrize('acceptance', [0.0, 0.6, 1.0])
def test_acceptance_is_as_told_and_outputs_are_the_targets(acceptance):
  expected, _ = serve(cases.make_engine())
  draft = ForcedDraft(acceptance=acceptance)
  engine = cases.make_engine(draft, FixedLength(3))
  # Nobody has written anything yet.
  assert serve(engine) == (expected, None)
  outputs, rate = serve(engine)
  assert outputs == expected
  assert rate == pytest.approx(acceptance, abs=0.1)
  assert serve(engine) == (outputs, rate)


def test_an_impossible_acceptance_is_refused():
  with pytest.raises(errors.UserError, match='acceptance'):
    ForcedDraft(acceptance=1.1)
