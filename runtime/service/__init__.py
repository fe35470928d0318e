"""Serving models over the network.

`core` knows models, requests and deltas but no transport, `grpc` and `http` carry them, `serve` is the life
of the process.
"""
