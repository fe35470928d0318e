"""Measuring how well a model predicts a text."""
