"""Forwards to `swiftspec_jax.cli.train_draft`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.train_draft', None, __name__, True)
