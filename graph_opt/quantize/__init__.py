"""Quantization of weights, activations and the KV cache, expressed in standard ONNX."""
