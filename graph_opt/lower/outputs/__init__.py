"""Select the logits and hidden states that a lowered graph returns."""
