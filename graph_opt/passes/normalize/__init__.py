"""Passes that rewrite equivalent computations into one form."""
