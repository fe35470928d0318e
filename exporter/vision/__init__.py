"""The graphs that turn pictures into rows of the decoder's input; one module per architecture."""
