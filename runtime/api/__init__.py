"""What a program calls: LLM, AsyncLLM, InferenceSession."""
