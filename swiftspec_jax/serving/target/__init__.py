"""The target's part of a step."""
