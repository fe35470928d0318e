"""Pre-norm decoders with RMSNorm, as Llama: x += attention(norm(x)); x += mlp(norm(x))."""
