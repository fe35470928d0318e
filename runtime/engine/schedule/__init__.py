"""Which request runs next."""
