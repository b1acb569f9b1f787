"""What a plan is made of."""
