"""Lower attention and KV caches to the targets' kernels."""
