"""The service without its transports: requests, deltas, models and errors."""
