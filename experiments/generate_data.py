"""Forwards to `swiftspec_jax.cli.generate_data`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.generate_data', None, __name__, True)
