"""The executors of lines: an engine in this process, worker processes, or a Ray cluster."""
