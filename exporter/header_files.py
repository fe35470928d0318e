"""Files of weights of which only the headers are there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..storage.writing import writing
from .gguf.header import ShortHeaderError, read_header

_FIRST = 4 << 20  # bytes of a GGUF file that are read first; vocabularies take 2 to 12 MB
_SMALL = 64 << 20  # a larger file that is no file of weights is none that a plan needs
_LENGTH = 8  # of the length of a safetensors header
_MOST_HEADER = 100 << 20  # of the safetensors format

Read = Callable[[int, int], bytes]
"""Returns bytes of the file: the first one and the number are its arguments."""


def write_header(path: Path, size: int, read: Read) -> None:
    """Write a file with the header of another one, as long as that; small files of other kinds are whole.

    Tensors of a GGUF file with factors of the rope, which belong to its configuration, are written too.

    Args:
        path: what is written; its folder is made.
        size: bytes of the whole file.
        read: see ``Read``.

    Raises:
        CheckpointError: the header is damaged.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[int, bytes]] = []
    if path.suffix == ".gguf":
        parts = _gguf_parts(path, size, read)
    elif path.suffix == ".safetensors":
        length = int.from_bytes(read(0, min(_LENGTH, size)), "little")
        if length > min(size, _MOST_HEADER):
            raise CheckpointError(
                f"{path.name} is damaged: its header has {length} bytes, and the file {size}"
            )
        parts = [(0, read(0, _LENGTH + length))]
    elif 0 < size <= _SMALL:
        parts = [(0, read(0, size))]
    with writing(path), path.open("wb") as file:
        for begin, content in parts:
            file.seek(begin)
            file.write(content)
        os.ftruncate(file.fileno(), size)


def _gguf_parts(path: Path, size: int, read: Read) -> list[tuple[int, bytes]]:
    known = min(_FIRST, size)
    while True:
        content = read(0, known)
        try:
            header = read_header(memoryview(content), path, size)
        except ShortHeaderError:
            known = min(4 * known, size)
            continue
        factors = [tensor for tensor in header.tensors if tensor.name.startswith("rope_")]
        return [(0, content), *((tensor.begin, read(tensor.begin, tensor.size)) for tensor in factors)]
