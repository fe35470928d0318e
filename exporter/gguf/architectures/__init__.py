"""One module per architecture of GGUF files, called like it, with ``_`` for ``-``.

It has ``NAME``, the architecture's, and ``ARCHITECTURE``: its differences from the common names and keys.
"""
