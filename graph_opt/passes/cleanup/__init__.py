"""Passes that remove redundant nodes."""
