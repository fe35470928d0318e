"""Reading, editing and describing one ONNX graph."""
