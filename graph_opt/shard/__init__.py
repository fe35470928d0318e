"""Cut a decoder's graph by weights into one graph for each process."""
