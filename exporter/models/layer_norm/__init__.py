"""Pre-norm decoders with LayerNorm and a feed-forward layer without a gate, as GPT-2."""
