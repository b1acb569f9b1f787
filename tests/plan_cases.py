"""A tiny deployment whose plans can be computed by hand."""

import dataclasses

import numpy as np

from configs.deployment import Deployment, Draft
from experiments.planning.plan_rounds import Recording
from swiftspec_jax.config import ModelConfig, TreeConfig
from swiftspec_jax.simulator.planning.forward import Chip
from swiftspec_jax.simulator.planning.rounds import Rounds

TINY = ModelConfig(
  family='llama',
  vocab_size=512,
  num_layers=2,
  embed_dim=128,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  ffw_dim=256,
  max_context=64,
  tie_embeddings=False,
)
CHIP = Chip(
  name='toy',
  memory_bytes=1e6,
  peak_flops={'bfloat16': 1e9},
  memory_bandwidth=1e6,
  link_bandwidth=1e4,
  link_latency=1e-3,
  launch_seconds=1e-4,
)

ROUNDS = Rounds(
  num_tokens=np.array([12, 6]),
  num_rounds=np.array([3, 2]),
  num_waits=np.array([1, 0]),
  num_growth_steps=2,
)

DRAFT = Draft(name='tiny', config=TINY, acceptance=0.5, source='a test')
PAIR = Deployment(
  name='x',
  target=TINY,
  drafts=(DRAFT,),
  chip=CHIP,
  num_chips=2,
  weight_dtypes=(None,),
  num_nodes=(4,),
  width=2,
  target_chips=(1,),
)


def recording(mode, acceptance=0.5, **changes):
  changes = {'num_growth_steps': 2 if mode == 'async' else 0, **changes}
  tree = TreeConfig(
    num_nodes=4, width=2, num_draft_steps=2, forced_acceptance=acceptance
  )
  return Recording(
    mode=mode,
    tree=tree,
    rounds=dataclasses.replace(ROUNDS, **changes),
    outcomes=(0.0, 0.0, 1.0),
  )


RECORDINGS = [recording('serial'), recording('async')]
