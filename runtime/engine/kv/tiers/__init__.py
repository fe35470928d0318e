"""KV that left the runner: host memory, then files."""
