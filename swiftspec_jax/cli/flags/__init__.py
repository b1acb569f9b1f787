"""Flags of the programs, and what they stand for."""
