"""A small model, and requests that are decoded to their ends."""

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

import swiftspec_jax as ss
from swiftspec_jax.config import ModelConfig
from swiftspec_jax.policies.cost_model.step_buckets import StepBuckets
from swiftspec_jax.scheduling.scheduler_config import SchedulerConfig
from swiftspec_jax.step.program_sizes import ProgramSizes

# A layer more is a fifth more to compile; tests of caches take two.
CONFIG = ModelConfig(
  family='llama',
  vocab_size=262,
  num_layers=1,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  ffw_dim=64,
  max_context=512,
)


def sizes_of(num_pages, max_context, page_size=16, contexts=None, **buckets):
  """Sizes of an engine's programs; by default all are for the longest text."""
  return ProgramSizes(
    scheduler=SchedulerConfig(
      buckets=StepBuckets(**buckets),
      num_pages=num_pages,
      max_context=max_context,
      page_size=page_size,
    ),
    contexts=(max_context,) if contexts is None else contexts,
  )


def tokenizer_of(tokens, special=(), **options):
  """A tokenizer that has these tokens, by their number, and merges none."""
  spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  spelled = [spell.pre_tokenize_str(token)[0][0] for token in tokens]
  vocabulary = {token: i for i, token in enumerate(spelled)}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  backend.add_special_tokens(list(special))
  backend.pre_tokenizer, backend.decoder = spell, decoders.ByteLevel()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, **options
  )


def request_of(token_ids, **sampling):
  return ss.Request(
    token_ids=tuple(token_ids), sampling=ss.SamplingParams(**sampling)
  )


def requests_of(num_requests, longest_prompt=90, **sampling):
  """Random prompts and, unless it is given, random numbers of tokens."""
  rng = np.random.default_rng(3)
  return [
    request_of(
      rng.integers(0, 256, rng.integers(1, longest_prompt)).tolist(),
      **{'max_new_tokens': int(rng.integers(1, 50)), **sampling},
    )
    for _ in range(num_requests)
  ]


def run(decoder, requests):
  """Returns the results in the order of the requests."""
  events = list(decoder.run(requests))
  found = {e.index: e.result for e in events if e.result is not None}
  for i, result in found.items():
    assert ''.join(e.text for e in events if e.index == i) == result.text
  return [found[i] for i in range(len(requests))]


def assert_same(got, want):
  for one, other in zip(got, want, strict=True):
    assert one.token_ids == other.token_ids
    assert one.finish_reason == other.finish_reason
