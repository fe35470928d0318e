"""The store of a URL."""

from __future__ import annotations

from .....errors import UsageError
from .bounded_store import BoundedStore
from .chunk_store import ChunkStore
from .file_system_store import FileSystemStore
from .served_store import DIRECT, SERVED, DirectStore, ServedStore
from .valkey_store import SCHEMES, ValkeyStore


def open_store(url: str) -> ChunkStore:
    """Open the store of a URL; no connection is made.

    Raises:
        UsageError: its client is not installed, or the URL is invalid.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(
            "prefix_cache_url must be a URL: redis://host:6379/0, s3://bucket/folder, file:///mnt/kv, "
            "serve://4GB, grpc://host:8001"
        )
    if scheme == SERVED:
        return ServedStore(url)
    if scheme in SCHEMES:
        return ValkeyStore(url)
    direct = scheme in (DIRECT, f"{DIRECT}s")
    return BoundedStore(DirectStore(url) if direct else FileSystemStore(url))
