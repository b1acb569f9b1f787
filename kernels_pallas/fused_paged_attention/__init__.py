"""Rotation, write to pages and paged attention in one launch."""
