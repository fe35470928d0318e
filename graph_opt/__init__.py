"""Passes and rules that normalise, fuse, quantize and lower ONNX graphs."""
