"""Passes that write equal computations in one way."""
