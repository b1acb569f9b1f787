"""Forwards to `swiftspec_jax.cli.doctor`; goes with 0.4."""

import runpy

runpy.run_module('swiftspec_jax.cli.doctor', None, __name__, True)
