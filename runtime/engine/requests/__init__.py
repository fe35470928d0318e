"""A request and a group of them."""
