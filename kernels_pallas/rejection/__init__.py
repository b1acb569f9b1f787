"""Which tokens of a drawn chain stand, from the logits of the distribution."""
