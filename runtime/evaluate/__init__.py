"""What is measured on a model: predictions, activations, speed and memory."""
