"""Attention of a token tree and of the prefix before it, in one launch."""
