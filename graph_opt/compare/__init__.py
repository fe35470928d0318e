"""Compare two graphs, by their results and by their structure."""
