"""Passes that normalise, fuse, quantize and lower ONNX graphs."""
