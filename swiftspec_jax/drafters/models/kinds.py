"""How a draft model drafts: by tokens, by blocks, or by masks."""

import dataclasses

from swiftspec_jax.drafters.engine_drafter import EngineDrafter
from swiftspec_jax.drafters.models.draft_block import (
  BlockChainDrafter,
  BlockTreeDrafter,
)
from swiftspec_jax.drafters.models.draft_chain import ChainDrafter
from swiftspec_jax.drafters.models.draft_masks import (
  MaskChainDrafter,
  MaskTreeDrafter,
)
from swiftspec_jax.drafters.models.draft_tree import TreeDrafter
from swiftspec_jax.drafters.models.model_drafter import ModelDrafter
from swiftspec_jax.drafters.models.model_spec import ModelSpec
from swiftspec_jax.drafters.spec import Setup
from swiftspec_jax.models.model import Model
from swiftspec_jax.step import target_forward

_CHAIN_LENGTH = 4  # draft tokens of a row, as each takes a forward


def of_model(model: Model) -> tuple[type[ModelDrafter], type[ModelDrafter]]:
  """Returns the drafters that make chains and trees of a model."""
  if model.config.block is None:
    return ChainDrafter, TreeDrafter
  if model.config.eagle3 is None:
    return BlockChainDrafter, BlockTreeDrafter
  return MaskChainDrafter, MaskTreeDrafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainDraft(ModelSpec):
  """Chains of a draft model; users give the model alone."""

  model: Model

  @property
  def name(self) -> str:
    return 'Model'

  @property
  def default_length(self) -> int:
    block = self.model.config.block
    if block is None:
      return _CHAIN_LENGTH
    return min(super().default_length, block.num_drafts)

  def num_forwards(self, length: int) -> int:
    is_block = self.model.config.block is not None
    return 1 if is_block else length  # one for all places of a block

  def make(self, setup: Setup) -> EngineDrafter:
    target_forward.check_kernels(self.model, setup.sizes)
    chains, _ = of_model(self.model)
    return chains(self.model, setup.sizes, setup.target)
