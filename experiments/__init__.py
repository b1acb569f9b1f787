"""Programs that decode, chat and measure; `python -m experiments.NAME`."""

import os

# Else transformers remarks at every start that torch is not installed.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
