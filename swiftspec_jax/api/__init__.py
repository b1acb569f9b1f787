"""What most users call: texts for prompts, one by one or many at once."""
