"""The transport-independent service: requests, deltas, models and errors."""
