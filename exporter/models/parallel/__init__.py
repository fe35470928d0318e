"""Decoders whose attention and feed-forward layer read the same residual sum."""
