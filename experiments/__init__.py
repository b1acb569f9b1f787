"""Programs that measure and plan; `python -m experiments.NAME`."""

import pathlib

# Commands have been programs here, and can be run so until 0.4.
__path__.append(str(pathlib.Path(__file__).parents[1] / 'swiftspec_jax/cli'))
