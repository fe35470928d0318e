"""Pipelines: lists of passes, the code that runs them, and their reports."""
