"""Static descriptions: what a model is and how to sample from it.

All are frozen dataclasses of plain Python values, hashable, so that they can
be static arguments of jitted functions.
"""

from swiftspec_jax.config.model_config import (
  DYNAMIC_TERMS,
  STORED,
  WEIGHT_DTYPES,
  WIDE,
  ModelConfig,
  group_size,
)
from swiftspec_jax.config.sampling_params import (
  MAX_TOP_LOGPROBS,
  SamplingParams,
)
from swiftspec_jax.config.structured_outputs import StructuredOutputs
from swiftspec_jax.config.tree_config import TreeConfig
