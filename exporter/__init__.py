"""Export Hugging Face checkpoints to portable ONNX packages, without torch."""
