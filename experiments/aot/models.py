"""Pairs of models to compile whole steps of, from their published sizes."""

import dataclasses

from configs import models
from swiftspec_jax.config import ModelConfig, TreeConfig

_SMOLLM2 = ModelConfig(
  family='llama',
  vocab_size=49_152,
  num_layers=30,
  embed_dim=576,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  ffw_dim=1536,
  max_context=8192,
  norm_eps=1e-5,
  rope_theta=100_000.0,
)
_GEMMA3 = ModelConfig(
  family='gemma3_text',
  vocab_size=262_144,
  num_layers=18,
  embed_dim=640,
  num_heads=4,
  num_kv_heads=1,
  head_dim=256,
  ffw_dim=2048,
  max_context=32_768,
  rope_theta=1e6,
  local_rope_theta=1e4,
  activation='gelu_tanh',
  use_qk_norm=True,
  use_post_norms=True,
  embed_scale=640**0.5,
  query_scale=256**-0.5,
  sliding_window=512,
  sliding_layers=tuple(layer % 6 != 5 for layer in range(18)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A target and a draft, each on devices of its own.

  Attributes:
    name: name for the table.
    target: model that verifies.
    draft: model that grows the tree; None leaves its steps out.
    splits: devices of target and draft.
    tree: sizes of the tree.
  """

  name: str
  target: ModelConfig
  draft: ModelConfig | None
  splits: tuple[tuple[int, int], ...]
  tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)


# By suite. Drafts of small models are their own first layers.
PAIRS = {
  'tiny': (
    Pair(
      name='2 layers of smollm2-135m with 1',
      target=_SMOLLM2.with_layers(2),
      draft=_SMOLLM2.with_layers(1),
      splits=((4, 4),),
    ),
  ),
  'builtin': (
    Pair(
      name='smollm2-135m with 10 layers',
      target=_SMOLLM2,
      draft=_SMOLLM2.with_layers(10),
      splits=((1, 1), (4, 4)),
    ),
    Pair(
      name='gemma3-270m with 6 layers',
      target=_GEMMA3,
      draft=_GEMMA3.with_layers(6),
      splits=((1, 1),),
    ),
  ),
  'large': (
    Pair(
      name='llama-8b with 1b',
      target=models.LLAMA_8B,
      draft=models.LLAMA_1B,
      splits=((4, 4), (6, 2)),
    ),
    Pair(
      name='llama-70b with 3b',
      target=models.LLAMA_70B,
      draft=models.LLAMA_3B,
      splits=((4, 4), (6, 2)),
    ),
    # As in the paper.
    Pair(
      name='llama-70b with 3b, int4',
      target=dataclasses.replace(models.LLAMA_70B, weight_dtype='int4'),
      draft=dataclasses.replace(models.LLAMA_3B, weight_dtype='int4'),
      splits=((4, 4), (6, 2)),
    ),
  ),
  'targets': tuple(
    Pair(
      name=name if dtype is None else f'{name}, {dtype}',
      target=dataclasses.replace(target, weight_dtype=dtype),
      draft=None,
      splits=((8, 0),),
    )
    for name, target in (
      ('llama4-scout', models.LLAMA4_SCOUT),
      ('gemma4-31b', models.GEMMA4_31B),
    )
    for dtype in (None, 'int4')
  ),
}
