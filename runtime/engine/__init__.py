"""Continuous batching: scheduler, slots, sampler. No tensor runtime is imported here."""
