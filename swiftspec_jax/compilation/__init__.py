"""The programs of an engine, and when they are compiled."""
