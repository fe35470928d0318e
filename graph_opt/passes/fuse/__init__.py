"""Passes that replace subgraphs by one operator."""
