"""Norms in the targets' kernels."""
