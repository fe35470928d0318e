"""The file format of a KV chunk, authenticated with a key.

Layout: magic and version, HMAC-SHA256 of the rest, the chunk's key, length of the header, header (JSON: the
dtype and the shape of each array), arrays.

Without the key nobody can write a chunk that is accepted, or tell from a file's name which tokens it holds.
HMAC: RFC 2104; processors compute SHA-256, so that it is twice as fast as BLAKE2b (RFC 7693) of the names.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
import mmap
import os
import struct
import uuid
from pathlib import Path

import ml_dtypes  # noqa: F401 -- makes NumPy know bfloat16 by name
import numpy as np

from ...requests.chunk import Parts

_MAGIC = b"carryall-kv 3\n"
_DIGEST = _KEY = 32  # bytes
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_START = len(_MAGIC) + _DIGEST + _KEY + _LENGTH.size  # of the header


class DamagedFileError(ValueError):
    """The file is damaged, was written with another key, or has another format version."""


def file_name(key: bytes, secret: bytes) -> str:
    """Return the file name of a chunk: a keyed hash of the chunk's key."""
    return hashlib.blake2b(key, key=secret, digest_size=_DIGEST, person=b"kv name").hexdigest()


def encode_chunk(key: bytes, parts: Parts, secret: bytes) -> list[bytes]:
    """Return the content of a chunk's file, in pieces; the arguments are those of ``write_chunk``."""
    arrays = [np.asarray(part) for part in parts]
    header = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    header += b" " * (-(_START + len(header)) % _ALIGNMENT)
    body = [key, _LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]
    digest = _mac(secret)
    for piece in body:
        digest.update(piece)
    return [_MAGIC, digest.digest(), *body]


def decode_chunk(view: memoryview, key: bytes, secret: bytes) -> Parts:
    """Authenticate the content of a chunk's file; the other arguments are those of ``write_chunk``.

    Returns:
        Read-only arrays of the memory of ``view``.

    Raises:
        DamagedFileError: the content was not written with this secret for this key.
    """
    if len(view) <= _START:
        raise DamagedFileError("it is too short")
    body = len(_MAGIC) + _DIGEST
    if view[: len(_MAGIC)] != _MAGIC:
        raise DamagedFileError("it has another format or version")
    digest = _mac(secret)
    digest.update(view[body:])
    if not hmac.compare_digest(digest.digest(), view[len(_MAGIC) : body]):
        raise DamagedFileError("it is damaged, or was written without this user's key")
    if view[body : body + _KEY] != key:
        raise DamagedFileError("it holds other tokens than its name says")
    (length,) = _LENGTH.unpack(view[body + _KEY : _START])
    arrays = view[_START + length :]
    return [
        np.ndarray(shape, dtype, arrays, offset)
        for dtype, shape, offset in _layout(bytes(view[_START : _START + length]))
    ]


def write_chunk(path: Path, key: bytes, parts: Parts, secret: bytes) -> int:
    """Write a chunk atomically: write a temporary file, then rename it.

    Args:
        path: the file.
        key: the chunk's key, a hash over the model and all tokens up to the chunk's end.
        parts: the chunk's arrays.
        secret: see ``storage.secret.kv_key``.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: the file cannot be written; the temporary file is removed.
    """
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with scratch.open("wb") as file:
            file.writelines(encode_chunk(key, parts, secret))
            size = file.tell()
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return size


def read_chunk(path: Path, key: bytes, secret: bytes) -> Parts:
    """Map a chunk's file and authenticate it; the arguments are those of ``write_chunk``.

    Returns:
        Read-only arrays that map the file.

    Raises:
        DamagedFileError: the file was not written with this secret for this key.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= _START:
            raise DamagedFileError("it is too short")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return decode_chunk(memoryview(data), key, secret)


def _mac(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret, b"kv content", hashlib.sha256)


@functools.lru_cache(8)  # the chunks of a model have the same header
def _layout(header: bytes) -> list[tuple[np.dtype[np.generic], tuple[int, ...], int]]:
    """Return dtype, shape and offset in bytes of each array."""
    layout, offset = list[tuple[np.dtype[np.generic], tuple[int, ...], int]](), 0
    for name, shape in json.loads(header):
        layout.append((np.dtype(name), tuple(shape), offset))
        offset += math.prod(shape) * layout[-1][0].itemsize
    return layout
