"""Export text encoders: embeddings, reranking and classification."""
