"""What holds of a graph: shapes, masks, axes and values, found by evaluation."""
