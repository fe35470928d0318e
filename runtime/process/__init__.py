"""Threads, signals and faults of the process."""
