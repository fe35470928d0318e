"""Algorithms that round weights."""
