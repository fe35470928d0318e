"""Collecting and summarizing activations on calibration data."""
