"""Mixtures of experts: finding their parts and writing them."""
