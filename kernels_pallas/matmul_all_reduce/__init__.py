"""Product with a weight shared by rows, and the sum of the devices' parts."""
