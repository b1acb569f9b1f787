"""Rotation, write to the cache and tree attention in one launch."""
