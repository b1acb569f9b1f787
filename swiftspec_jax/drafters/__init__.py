"""Drafters: who proposes the tokens that the target verifies."""

from swiftspec_jax.step.stateless_drafter import (
  StatelessDrafter as StatelessDrafter,
)
