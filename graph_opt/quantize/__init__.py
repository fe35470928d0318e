"""Weight and activation quantization, expressed in standard ONNX."""
