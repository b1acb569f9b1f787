"""The pair of table 7 of the SwiftSpec paper, with published step times."""

from configs import acceptance, models
from configs.deployment import Deployment, Draft, Published
from configs.hardware import nvidia

CONFIG = Deployment(
  name='Qwen2-72B + 1.5B on 8 H800',
  target=models.QWEN2_72B,
  drafts=(
    Draft(
      name='1.5B',
      config=models.QWEN2_1B5,
      acceptance=acceptance.QWEN2_72B_1B5,
      source=acceptance.QWEN2_72B_1B5_SOURCE,
    ),
  ),
  chip=nvidia.H800,
  num_chips=8,
  published=(
    Published(
      source='table 7',
      mode='async',
      target_chips=6,
      tokens_per_second=274,
      target_seconds=0.01048,
      draft_seconds=0.00325,
    ),
    Published(
      source='table 7',
      mode='serial',
      target_chips=8,
      tokens_per_second=200,
      target_seconds=0.01034,
      draft_seconds=0.00373,
    ),
  ),
  published_split=6,  # sections 4.3 and 4.5; table 9 has 4
)
