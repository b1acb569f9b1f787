"""Who drafts for the rows of an engine."""
