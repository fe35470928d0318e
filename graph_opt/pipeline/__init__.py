"""Which passes run, in which order, and the reports about them."""
