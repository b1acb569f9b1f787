"""Sum of two rows, its norm, and the product with a quantized weight."""
