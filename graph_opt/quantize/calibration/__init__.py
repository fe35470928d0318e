"""Collect and summarise activations on calibration data."""
