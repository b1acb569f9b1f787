"""Forwards to `swiftspec_jax.cli.build_store`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.build_store', None, __name__, True)
