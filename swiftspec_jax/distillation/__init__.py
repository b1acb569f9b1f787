"""Draft models that the target teaches: its own text, and training on it."""
