"""Passes that give a decoder graph the KV cache of the contract."""
