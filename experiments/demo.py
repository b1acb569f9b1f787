"""Forwards to `swiftspec_jax.cli.demo`; goes with 0.4."""

import runpy

if __name__ == '__main__':
  runpy.run_module(
    'swiftspec_jax.cli.demo', run_name='__main__', alter_sys=True
  )
