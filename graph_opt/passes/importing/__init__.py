"""Passes that convert other exporters' graphs to the canonical form."""
