"""Product of rows with narrow weights of their experts, read once if at all."""
