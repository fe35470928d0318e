"""Speculative decoding: cheap proposals for the next tokens, checked by the model several at a time."""
