"""Checkpoints of other quantizers: AWQ, GPTQ, compressed-tensors, bitsandbytes, BitNet."""
