"""Serving in virtual time: the same policies and scheduler, no models.

`simulate` runs the steps of an engine whose forwards take the time that a cost
model predicts, and whose drafts are accepted by drawn luck.
"""

from swiftspec_jax.simulator.acceptance import (
  ChainAcceptance,
  TreeAcceptance,
  best_nodes,
)
from swiftspec_jax.simulator.simulation import (
  Acceptance,
  Simulation,
  simulate,
  step_seconds,
)

__all__ = [
  'Acceptance',
  'ChainAcceptance',
  'Simulation',
  'TreeAcceptance',
  'best_nodes',
  'simulate',
  'step_seconds',
]
