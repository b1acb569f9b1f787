"""Continuous batching: which rows a step has, and what each may feed."""
