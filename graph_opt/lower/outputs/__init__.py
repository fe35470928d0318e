"""Which logits and hidden states a lowered graph returns."""
