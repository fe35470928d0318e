"""Choosing ranges, formats and roundings from measurements."""
