"""Access control: API keys, their budgets, certificates, and limits of requests."""
