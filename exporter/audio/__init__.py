"""``audio.onnx`` of models that hear: one module for each ``model_type``, and how sound becomes its input."""
