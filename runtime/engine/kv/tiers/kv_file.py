"""The file format of a KV chunk, authenticated with a key.

Layout: magic and version, keyed BLAKE2b of the rest, length of the header, header (JSON), arrays.

Without the key nobody can write a chunk that is accepted, or tell from a file's name which tokens it holds.
BLAKE2b: RFC 7693, keyed hashing as in its section 2.9.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import mmap
import os
import struct
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 -- makes NumPy know bfloat16 by name
import numpy as np
import numpy.typing as npt

from ...requests.chunk import Parts

_MAGIC = b"carryall-kv 2\n"
_DIGEST = 32  # bytes
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64


class DamagedFileError(ValueError):
    """The file is damaged, was written with another key, or has another format version."""


def file_name(key: bytes, secret: bytes) -> str:
    """Return the file name of a chunk: a keyed hash of the chunk's key."""
    return hashlib.blake2b(key, key=secret, digest_size=_DIGEST, person=b"kv name").hexdigest()


def encode_chunk(key: bytes, parts: Parts, secret: bytes) -> list[bytes]:
    """Return the content of a chunk's file, in pieces; the arguments are those of ``write_chunk``."""
    arrays = [np.asarray(part) for part in parts]
    facts = {"key": key.hex(), "parts": [[array.dtype.name, array.shape] for array in arrays]}
    header = json.dumps(facts).encode()
    before = len(_MAGIC) + _DIGEST + _LENGTH.size
    header += b" " * (-(before + len(header)) % _ALIGNMENT)
    body = [_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]
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
    if len(view) <= len(_MAGIC) + _DIGEST + _LENGTH.size:
        raise DamagedFileError("it is too short")
    body = len(_MAGIC) + _DIGEST
    if view[: len(_MAGIC)] != _MAGIC:
        raise DamagedFileError("it has another format or version")
    digest = _mac(secret)
    digest.update(view[body:])
    if not hmac.compare_digest(digest.digest(), view[len(_MAGIC) : body]):
        raise DamagedFileError("it is damaged, or was written without this user's key")
    (length,) = _LENGTH.unpack(view[body : body + _LENGTH.size])
    begin = body + _LENGTH.size
    header = json.loads(bytes(view[begin : begin + length]))
    if header["key"] != key.hex():
        raise DamagedFileError("it holds other tokens than its name says")
    return _arrays(view[begin + length :], header["parts"])


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
        if os.fstat(file.fileno()).st_size <= len(_MAGIC) + _DIGEST + _LENGTH.size:
            raise DamagedFileError("it is too short")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return decode_chunk(memoryview(data), key, secret)


def _mac(secret: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key=secret, digest_size=_DIGEST, person=b"kv content")


def _arrays(view: memoryview, facts: list[Any]) -> Parts:
    parts: list[npt.NDArray[Any]] = []
    offset = 0
    for name, shape in facts:
        dtype = np.dtype(name)
        count = math.prod(shape)
        parts.append(np.frombuffer(view, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    return parts
