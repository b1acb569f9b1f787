"""Moves kept rows in pages one after another, in all layers at once."""
