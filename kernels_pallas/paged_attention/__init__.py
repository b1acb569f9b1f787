"""Attention to rows whose keys and values lie in pages, in one launch."""
