"""Lower matrix products and mixtures of experts to the targets' kernels."""
