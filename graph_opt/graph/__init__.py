"""Read, edit and describe one ONNX graph."""
