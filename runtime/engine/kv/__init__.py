"""Which slot holds which tokens."""
