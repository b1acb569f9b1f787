"""Gate and up products of a gated layer, and its activation, in one launch."""
