"""What answers lines: an engine of this process, other processes, a cluster."""
