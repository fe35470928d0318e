"""How a weight is rounded."""
