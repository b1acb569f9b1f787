"""Top-k and top-p: the least logit that a token needs."""
