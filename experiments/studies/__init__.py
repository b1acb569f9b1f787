"""What studies of several settings have in common."""
