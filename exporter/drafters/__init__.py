"""Drafters: heads in folders of their own that read hidden states of the model they were trained for."""
