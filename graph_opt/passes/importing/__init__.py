"""Passes that turn other exporters' graphs into the canonical form."""
