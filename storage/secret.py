"""The user's secret key, which authenticates KV cache files in a shared folder."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import uuid
from pathlib import Path

from ..errors import UsageError
from .root import cache_root, unusable

KV_KEY_VARIABLE = "CARRYALL_KV_KEY"
_FILE = "kv.key"
_BYTES = 32
_SHORTEST = 16  # characters of the environment variable


def kv_key() -> bytes:
    """Return the 32-byte key.

    It is the BLAKE2b hash of ``CARRYALL_KV_KEY``, else the content of ``kv.key`` in the cache folder, which
    is created with random bytes if it is missing.

    Raises:
        UsageError: the variable has fewer than 16 characters; or the file is damaged, cannot be read, or can
            be read by other users.
    """
    stated = os.environ.get(KV_KEY_VARIABLE)
    if stated is not None:
        if len(stated) < _SHORTEST:
            raise UsageError(f"{KV_KEY_VARIABLE} has {len(stated)} characters; it needs {_SHORTEST} or more")
        return hashlib.blake2b(stated.encode("utf-8", "surrogateescape"), digest_size=_BYTES).digest()
    path = cache_root() / _FILE
    try:
        if not path.exists() and not path.is_symlink():
            _make(path)
        return _read(path)
    except PermissionError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; users who share a cache set {KV_KEY_VARIABLE}"
        ) from error
    except OSError as error:
        raise unusable(error) from error


def _make(path: Path) -> None:
    """Write the file under a temporary name and link it to its final name; the first process wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            os.link(scratch, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_BYTES + 1)
    except PermissionError:
        raise
    except OSError as error:  # a folder, or a link to nothing
        raise UsageError(f"{path} cannot be read: {error.strerror}; delete it") from error
    if os.name != "nt" and stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} can be read by other users: chmod 600 {path}, or delete it")
    if len(key) != _BYTES:
        raise UsageError(f"{path} is damaged: it holds {len(key)} bytes instead of {_BYTES}; delete it")
    return key
