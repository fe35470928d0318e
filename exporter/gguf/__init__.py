"""Reads GGUF files: weights, configuration and tokenizer."""
