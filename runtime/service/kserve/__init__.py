"""The Open Inference Protocol (KServe v2) without its transports: tensors, inference, facts of models."""
