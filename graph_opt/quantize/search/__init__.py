"""Choose ranges, formats and roundings from measurements."""
