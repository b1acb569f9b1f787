"""Product with a weight of int8 or int4, read once as it is stored."""
