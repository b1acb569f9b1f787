"""Forwards to `swiftspec_jax.cli.serve`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.serve', None, __name__, True)
