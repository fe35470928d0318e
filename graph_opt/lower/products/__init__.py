"""Matrix products and experts in the targets' kernels."""
