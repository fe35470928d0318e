"""Memory for keys and values: buffers, blocks, selections."""
