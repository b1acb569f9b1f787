"""Moves kept rows in pages behind each other, in all layers at once."""
