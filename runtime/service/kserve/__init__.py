"""The Open Inference Protocol (KServe v2), independent of transport: tensors, inference, model metadata."""
