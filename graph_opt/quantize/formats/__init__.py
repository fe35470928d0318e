"""Passes that write a quantized form into the graph."""
