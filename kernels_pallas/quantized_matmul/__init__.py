"""Product with a weight of int8, int4 or float8, read once as it is stored."""
