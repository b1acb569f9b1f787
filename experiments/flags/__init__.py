"""Flags of several programs."""
