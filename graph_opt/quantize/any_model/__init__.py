"""Quantization of any float graph: convolutions, matrix products and tables, calibrated on tensors."""
