"""Quantization of any float graph: convolutions, matrix products and lookup tables, calibrated on samples."""
