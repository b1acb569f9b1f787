"""Moves the rows that a verdict keeps, in the caches of all layers at once."""
