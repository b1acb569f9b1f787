"""Forwards to `swiftspec_jax.cli.train_draft`; goes with 0.4."""

import runpy

if __name__ == '__main__':
  runpy.run_module(
    'swiftspec_jax.cli.train_draft', run_name='__main__', alter_sys=True
  )
