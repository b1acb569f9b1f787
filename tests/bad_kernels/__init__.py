"""A kernel package of which most kernels are no good, on purpose."""
