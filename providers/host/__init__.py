"""What this machine has: processors, libraries, drivers."""
