"""The headline of the SwiftSpec paper: Llama-3-70B and 3B on eight H800."""

from configs import acceptance, models
from configs.deployment import Deployment, Published
from configs.hardware import nvidia

CONFIG = Deployment(
  name='Llama-3-70B + 3B on 8 H800',
  target=models.LLAMA_70B,
  draft=models.LLAMA_3B,
  chip=nvidia.H800,
  num_chips=8,
  acceptance=acceptance.STAND_ALONE,
  goal=348.0,  # of the paper's first version
  published=(
    Published(
      source='table 10', mode='async', target_chips=4, tokens_per_second=347
    ),
    Published(
      source='table 11 (Llama-3.3)',
      mode='async',
      target_chips=4,
      tokens_per_second=369,
    ),
  ),
  published_split=4,
)
