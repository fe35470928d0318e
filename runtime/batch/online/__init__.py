"""Batch jobs of the service's files and batches endpoints, run on the service's models."""
