"""Find mixtures of experts in a graph, and write them in canonical form."""
