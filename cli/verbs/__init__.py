"""One module a verb, each exporting ``command``."""
