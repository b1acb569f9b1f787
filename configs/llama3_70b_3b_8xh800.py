"""The headline of the SwiftSpec paper: Llama-3-70B and 3B on eight H800.

Llama-3-8B is another draft to choose. Nobody has published how often 1B is
right, so it is left out.
"""

from configs import acceptance, models
from configs.deployment import Deployment, Draft, Published
from configs.hardware import nvidia

CONFIG = Deployment(
  name='Llama-3-70B on 8 H800',
  target=models.LLAMA_70B,
  drafts=(
    Draft(
      name='3B',
      config=models.LLAMA_3B,
      acceptance=acceptance.QWEN2_72B_1B5,
      source=acceptance.LLAMA_70B_3B_SOURCE,
    ),
    Draft(
      name='8B',
      config=models.LLAMA_8B,
      acceptance=acceptance.LLAMA_70B_8B,
      source=acceptance.LLAMA_70B_8B_SOURCE,
    ),
  ),
  chip=nvidia.H800,
  num_chips=8,
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
