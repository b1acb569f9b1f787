"""Llama-3-70B and 3B on eight H200: can 400 tokens a second be had?"""

import dataclasses

from configs.hardware import nvidia
from configs.llama3_70b_3b_8xh800 import CONFIG as _H800

CONFIG = dataclasses.replace(
  _H800,
  name='Llama-3-70B on 8 H200',
  chip=nvidia.H200,
  goal=400.0,
  published=(),
  published_split=None,
)
