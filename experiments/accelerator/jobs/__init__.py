"""What the sections of a report run."""
