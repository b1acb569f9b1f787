"""Shapes and clocks of the kernels."""
