"""Lower norms to the targets' kernels."""
