"""Forwards to `swiftspec_jax.cli.demo`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.demo', None, __name__, True)
