"""Batch jobs behind a service's files and batches endpoints, run by the engine that serves."""
