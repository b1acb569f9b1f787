"""From scores of the vocabulary to the accepted path and its tokens."""
