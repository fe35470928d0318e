"""One module per family of encoders."""
