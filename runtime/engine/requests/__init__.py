"""The state of requests, and what their prompts cost."""
