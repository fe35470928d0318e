"""Comparing two graphs by what they compute."""
