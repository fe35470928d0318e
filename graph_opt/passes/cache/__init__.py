"""Passes that give a graph the KV cache of the contract."""
