"""Attention and KV caches as the targets compute them."""
