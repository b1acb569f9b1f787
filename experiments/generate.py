"""Forwards to `swiftspec_jax.cli.generate`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.generate', None, __name__, True)
