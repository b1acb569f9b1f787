"""Small data of distillation that several tests share."""

import numpy as np

from swiftspec_jax import config as config_lib
from swiftspec_jax import testing
from swiftspec_jax.distillation import samples, shards

NUM_STORED = 4
CONFIG = config_lib.ModelConfig(
  family='llama',
  vocab_size=272,
  num_layers=3,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  ffw_dim=48,
  max_context=4096,
  eos_token_ids=(257,),
)


FEATURE_LAYERS = (0, 2)


def target():
  return testing.random_model(CONFIG, name='tiny')


def random_groups(
  seed, num_groups=24, num_samples=3, feature_layers=FEATURE_LAYERS
):
  """Groups whose distributions are random, but whose best token is a
  function."""
  rng = np.random.default_rng(seed)

  def top(token_ids):
    size = len(token_ids)
    probs = np.sort(rng.dirichlet(np.ones(NUM_STORED + 1), size))[:, ::-1]
    ids = (7 * token_ids[:, None] + np.arange(NUM_STORED) * 11) % 256
    return ids, np.log(probs[:, :NUM_STORED] + 1e-6)

  def features(token_ids):
    size = (len(token_ids), len(feature_layers) * CONFIG.embed_dim)
    return rng.standard_normal(size).astype(np.float16)

  def tokens(size):
    return rng.integers(0, 256, size).astype(np.int32)

  def sample():
    token_ids = tokens(rng.integers(12, 40))
    ids, log_probs = top(token_ids)
    roles = np.full(len(token_ids), samples.Role.ANSWER, np.uint8)
    roles[:4] = samples.Role.GIVEN
    return samples.Sample(
      features=features(token_ids),
      kind=samples.KINDS[rng.integers(len(samples.KINDS))],
      temperature=0.0,
      token_ids=token_ids,
      roles=roles,
      top_token_ids=ids,
      top_log_probs=log_probs,
    )

  def group():
    token_ids = tokens(rng.integers(5, 60))
    ids, log_probs = top(token_ids)
    return samples.Group(
      features=features(token_ids),
      has_document=bool(rng.integers(2)),
      token_ids=token_ids,
      top_token_ids=ids,
      top_log_probs=log_probs,
      samples=tuple(sample() for _ in range(num_samples)),
    )

  return [group() for _ in range(num_groups)]


def write_data(
  directory, num_shards=3, vocab_size=272, feature_layers=FEATURE_LAYERS
):
  """Writes groups of one sample, so that all batches have the same shape."""
  directory.mkdir()
  for number in range(num_shards):
    shards.write_shard(
      shards.shard_path(directory, number),
      random_groups(number, num_samples=1, feature_layers=feature_layers),
      {
        'target': 'tiny',
        'vocab_size': vocab_size,
        'feature_layers': feature_layers,
      },
    )
