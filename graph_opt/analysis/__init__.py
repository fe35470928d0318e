"""Facts about a graph, found by evaluation: shapes, masks, axes and values."""
