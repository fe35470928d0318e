"""Passes that lower portable operators to a target's kernels."""
