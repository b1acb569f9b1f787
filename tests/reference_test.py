"""The papers on one page, and the engine."""

import dataclasses

import pytest
import serving_cases
from decoding_cases import request_of
from engine_cases import trees_of
from tree_cases import DEVICES, TREE, pair

import swiftspec_jax as ss
from swiftspec_jax import reference
from swiftspec_jax.policies.goodput import Goodput
from swiftspec_jax.tree import types

# So large that no node is dropped, as the page drops none.
SIZES = dataclasses.replace(TREE, capacity=256, num_cache_rows=128)
PROMPT, NUM_TOKENS = (3, 1, 4, 1, 5, 9, 2, 6), 40


def rounds_of_engine(target, draft, tree):
  """Tokens, parents and outcomes that the engine sends, and its output."""
  request = request_of(PROMPT, max_new_tokens=NUM_TOKENS)
  decoder = ss.Decoder(target, draft, tree=tree, run_ahead=0)
  found = []
  with decoder.engine_for([request]) as engine:
    draft_fn = engine.drafter.draft

    def recorded(view, lengths, texts):
      drafts = draft_fn(view, lengths, texts)
      trees, size = trees_of(drafts), int(drafts.drafts.lengths[0]) + 1
      outcome = int(trees.outcome[0])
      outcome = None if outcome == types.NO_OUTCOME else outcome
      fields = trees.token_ids, trees.parents
      found.append((*(field[0, :size].tolist() for field in fields), outcome))
      return drafts

    engine.drafter.draft = recorded
    result = engine.submit(request).result()
  return found, result.token_ids


@pytest.mark.parametrize('mode', DEVICES)
@pytest.mark.parametrize('draft_seed', [0, 1], ids=['own', 'bad'])
def test_swiftspec(mode, draft_seed):
  """Every tree that is sent, and every outcome, in both modes."""
  target, draft = pair(*DEVICES[mode], draft_seed)
  found, output = rounds_of_engine(target, draft, SIZES)
  longest = len(PROMPT) + NUM_TOKENS + 16
  logits = (reference.logits_fn(model, longest) for model in (target, draft))
  start, is_async = [*PROMPT, output[0]], mode == 'async'
  rounds = list(
    reference.swiftspec(
      *logits, start, SIZES, NUM_TOKENS - 1, is_async=is_async
    )
  )
  verified = [token_id for round_ in rounds for token_id in round_.verified]
  assert (output[0], *verified) == output
  # With room for one token the engine sends nothing.
  sent = [(*x.sent, x.outcome) for x in rounds if len(x.sent[0]) > 1]
  assert found == sent
  assert len(sent) > 5


@pytest.mark.parametrize('num_rows', [1, 4, 32])
@pytest.mark.parametrize('acceptance', [0.2, 0.6, 0.9])
def test_smartspec(num_rows, acceptance):
  costs = serving_cases.linear_costs(fixed=10.0, query_tokens=0.2, steps=1.0)
  buckets = serving_cases.unpadded(num_rows, max_length=6)
  view = serving_cases.make_view(num_rows, buckets)

  def seconds(length):
    tokens = num_rows * (length + 1)
    kv_tokens = int(view.kv_lengths.sum())
    return costs.predict(num_rows, tokens, kv_tokens, length).total

  plan = Goodput(costs, serving_cases.Oracle(acceptance)).plan_draft(view)
  best = reference.smartspec(acceptance, seconds, num_rows, buckets.lengths)
  assert plan.lengths.tolist() == [best] * num_rows
