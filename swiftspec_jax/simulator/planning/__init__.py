"""Plans: how fast decoding will be on chips that one does not have."""
