"""From a model name to a loaded, lowered model."""
