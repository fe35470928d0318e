"""One module per projector type of GGUF files of vision towers, called like it, with ``_`` for other signs.

It has ``NAME``, the type's, and ``PROJECTOR``: its names, keys and forms of tensors.
"""
