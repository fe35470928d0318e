"""Passes that remove nodes without effect."""
