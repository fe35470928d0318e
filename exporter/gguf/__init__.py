"""Read GGUF files: weights, configuration and tokenizer."""
