"""Sessions, memory and placement on ONNX Runtime."""
