"""The command `swiftspec`: programs that decode, chat, serve and train."""

import os

# Else transformers remarks at every start that torch is not installed.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
