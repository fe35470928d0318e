"""Passes that write a quantized format into the graph."""
