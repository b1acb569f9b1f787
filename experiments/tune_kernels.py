"""Forwards to `python -m experiments.kernels tune`; goes with 0.4."""

import runpy
import sys

if __name__ == '__main__':
  sys.argv.insert(1, 'tune')
  runpy.run_module('experiments.kernels', run_name='__main__', alter_sys=True)
