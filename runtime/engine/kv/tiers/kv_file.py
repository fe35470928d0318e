"""The file format of a KV chunk, authenticated with a key.

Layout: magic, version and algorithm, 32 bytes that authenticate the rest, the chunk's key, length of the
header, header (JSON: the dtype and the shape of each array), arrays.

Without the key nobody can write a chunk that is accepted, or tell from a file's name which tokens it holds.

- ``gmac`` is AES-256-GMAC (NIST SP 800-38D): a salt of 16 random bytes and the tag of 16 bytes. Each chunk
  has a key of its own, HMAC-SHA256 of the salt, so that no nonce is used twice. It takes a tenth of HMAC's
  time.
- ``hmac`` is HMAC-SHA256 (RFC 2104). It is written where the package cryptography is not installed.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import json
import math
import mmap
import os
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 -- makes NumPy know bfloat16 by name
import numpy as np
import numpy.typing as npt

from ...requests.chunk import Parts

_VERSION = b"carryall-kv 4 "
_HMAC, _GMAC = b"hmac\n", b"gmac\n"
_NAME = 5  # bytes, of an algorithm
_PROOF = _KEY = _NAMED = 32  # bytes, the last of a file's name
_SALT = 16  # bytes of the proof that are not the tag
_NONCE = bytes(12)
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_BODY = len(_VERSION) + _NAME + _PROOF  # where it begins
_START = _BODY + _KEY + _LENGTH.size  # of the header


class DamagedFileError(ValueError):
    """The file is damaged, was written with another key, or has another format version."""


def file_name(key: bytes, secret: bytes) -> str:
    """Return the file name of a chunk: a keyed hash of the chunk's key.

    Files of another version have other names, so that services of both versions can share a store.
    """
    return hashlib.blake2b(key, key=secret, digest_size=_NAMED, person=_VERSION[:16]).hexdigest()


def encode_chunk(key: bytes, parts: Parts, secret: bytes) -> bytearray:
    """Return the content of a chunk's file; the arguments are those of ``write_chunk``."""
    arrays = [np.asarray(part) for part in parts]
    header = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    header += b" " * (-(_START + len(header)) % _ALIGNMENT)
    name = _HMAC if _gmac() is None else _GMAC
    before = [_VERSION, name, bytes(_PROOF)]
    body = [key, _LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]
    content = bytearray().join([*before, *body])
    content[_BODY - _PROOF : _BODY] = _proof(name, memoryview(content)[_BODY:], secret, os.urandom(_SALT))
    return content


def decode_chunk(view: memoryview, key: bytes, secret: bytes) -> Parts:
    """Authenticate the content of a chunk's file; the other arguments are those of ``write_chunk``.

    Returns:
        Read-only arrays of the memory of ``view``.

    Raises:
        DamagedFileError: the content was not written with this secret for this key.
    """
    if len(view) <= _START:
        raise DamagedFileError("it is too short")
    name = bytes(view[len(_VERSION) : len(_VERSION) + _NAME])
    if view[: len(_VERSION)] != _VERSION or name not in (_HMAC, _GMAC):
        raise DamagedFileError("it has another format or version")
    proof = bytes(view[_BODY - _PROOF : _BODY])
    if not hmac.compare_digest(_proof(name, view[_BODY:], secret, proof[:_SALT]), proof):
        raise DamagedFileError("it is damaged, or was written without this user's key")
    if view[_BODY : _BODY + _KEY] != key:
        raise DamagedFileError("it holds other tokens than its name says")
    (length,) = _LENGTH.unpack(view[_BODY + _KEY : _START])
    arrays, parts = view[_START + length :], list[npt.NDArray[Any]]()
    for count, dtype, shape, offset in _layout(bytes(view[_START : _START + length])):
        if shape and count > 1:  # views of one array are made in a tenth of the time
            parts.extend(np.ndarray((count, *shape), dtype, arrays, offset))
        else:
            size = math.prod(shape) * dtype.itemsize
            parts += [np.ndarray(shape, dtype, arrays, offset + i * size) for i in range(count)]
    return parts


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
            size = file.write(encode_chunk(key, parts, secret))
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


def _proof(name: bytes, body: memoryview, secret: bytes, salt: bytes) -> bytes:
    """Return what authenticates a body.

    Args:
        name: of the algorithm.
        body: what is authenticated.
        secret: see ``write_chunk``.
        salt: random bytes; HMAC needs none.

    Raises:
        DamagedFileError: the algorithm is not installed.
    """
    if name == _HMAC:
        digest = hmac.new(secret, b"kv content", hashlib.sha256)
        digest.update(body)
        return digest.digest()
    gmac = _gmac()
    if gmac is None:
        raise DamagedFileError(
            "AES-256-GMAC authenticates it, which needs cryptography; install it: "
            "pip install 'carryall[shared-cache]'"
        )
    return salt + gmac(hmac.digest(secret, b"kv gmac" + salt, "sha256"), body)


@functools.cache
def _gmac() -> Callable[[bytes, memoryview], bytes] | None:
    """Return a function of a key, which is used once, and of a body; None without cryptography."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return lambda key, body: AESGCM(key).encrypt(_NONCE, b"", body)


@functools.lru_cache(8)  # the chunks of a model have the same header
def _layout(header: bytes) -> list[tuple[int, np.dtype[np.generic], tuple[int, ...], int]]:
    """Return the count, dtype, shape and offset in bytes of arrays that follow each other and are alike."""
    layout, offset = list[tuple[int, np.dtype[np.generic], tuple[int, ...], int]](), 0
    for (name, shape), alike in itertools.groupby(json.loads(header)):
        count, dtype = len(list(alike)), np.dtype(name)
        layout.append((count, dtype, tuple(shape), offset))
        offset += count * math.prod(shape) * dtype.itemsize
    return layout
