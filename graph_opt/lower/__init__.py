"""Rules that turn portable operators into a target's own kernels."""
