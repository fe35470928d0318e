"""Comparing two models: by their results and by their structure."""
