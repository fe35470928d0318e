"""Stores that several processes and hosts share: Valkey, and file systems of fsspec."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from .....errors import UsageError
from .served_store import DIRECT, SERVED, DirectStore, ServedStore

_VALKEY = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_SOCKET_SECONDS = 5.0  # then a call of Valkey's client fails
_IN_FLIGHT = 4  # requests that are sent before the first is answered


class ChunkStore(Protocol):
    """Contents by name. Any method may raise any exception of its client.

    Attributes:
        read_only: whether ``put`` does nothing.
    """

    read_only: bool

    def held(self, names: Sequence[str]) -> int:
        """Return how many first names have a content."""

    def last_held(self, names: Sequence[str]) -> int:
        """Return how many names there are up to the last one that has a content; 0 if none has."""

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        """Yield the content of each name, in order; None if there is none. It may be closed early."""

    def put(self, name: str, content: bytes) -> None:
        """Store a content; readers see all of it or nothing."""

    def close(self) -> None:
        """Close connections."""


class ValkeyStore:
    """A store in a server of the Redis protocol, which evicts by its own policy (``maxmemory-policy``).

    Args:
        url: ``redis://[user:password@]host:port/database``, or with ``rediss``, ``valkey`` or ``unix``.

    Raises:
        UsageError: the client is not installed, or the URL is invalid.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        client = _imported("redis")
        scheme, _, rest = url.partition("://")
        try:
            self._client: Any = client.Redis.from_url(
                f"{_VALKEY[scheme]}://{rest}",
                socket_timeout=_SOCKET_SECONDS,
                socket_connect_timeout=_SOCKET_SECONDS,
            )
        except ValueError as error:
            raise UsageError(f"prefix_cache_url is no URL of a server: {error}") from error

    def held(self, names: Sequence[str]) -> int:
        """Return how many first names have a content, by one exchange."""
        exist = self._exist(names)
        return exist.index(False) if False in exist else len(names)

    def last_held(self, names: Sequence[str]) -> int:
        """Return how many names there are up to the last one that has a content, by one exchange."""
        exist = self._exist(names)
        return next((i for i in range(len(exist), 0, -1) if exist[i - 1]), 0)

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        """Yield the content of each name, in order, with several requests on their way."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        unanswered = 0
        try:
            for i in range(len(names) + _IN_FLIGHT):
                if i < len(names):
                    connection.send_command("GET", _valkey_key(names[i]))
                    unanswered += 1
                if i >= _IN_FLIGHT:
                    content = connection.read_response(disable_decoding=True)
                    unanswered -= 1
                    yield content
        finally:
            if unanswered:  # the next user of the connection must not read these answers
                connection.disconnect()
            pool.release(connection)

    def put(self, name: str, content: bytes) -> None:
        """Store a content."""
        self._client.set(_valkey_key(name), content)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _exist(self, names: Sequence[str]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(_valkey_key(name))
            return [bool(count) for count in pipeline.execute()]


class FileSystemStore:
    """A store in a folder of any file system of fsspec: ``s3://bucket/folder``, ``gs://``, ``file:///mnt/nfs``.

    Contents are written under another name and renamed, where the file system has whole objects only at once.

    Args:
        url: of the folder.

    Raises:
        UsageError: fsspec, or its part for this file system, is not installed; or the URL is invalid.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        fsspec = _imported("fsspec")
        try:
            self._files, self._folder = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"prefix_cache_url cannot be used: {error}") from error

    def held(self, names: Sequence[str]) -> int:
        """Return how many first names have a content."""
        return next(
            (i for i, name in enumerate(names) if not self._files.exists(self._path(name))), len(names)
        )

    def last_held(self, names: Sequence[str]) -> int:
        """Return how many names there are up to the last one that has a content."""
        return next((i for i in range(len(names), 0, -1) if self._files.exists(self._path(names[i - 1]))), 0)

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        """Yield the content of each name, in order; file systems of networks read several at once."""
        for begin in range(0, len(names), _IN_FLIGHT):
            paths = [self._path(name) for name in names[begin : begin + _IN_FLIGHT]]
            for content in self._files.cat_ranges(paths, None, None, on_error="return"):
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
                yield None if isinstance(content, Exception) else content

    def put(self, name: str, content: bytes) -> None:
        """Store a content."""
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        scratch = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        self._files.pipe_file(scratch, content)
        self._files.mv(scratch, path)

    def close(self) -> None:
        """Do nothing: file systems are shared."""

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}.kv"


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
    if scheme in (DIRECT, f"{DIRECT}s"):
        return DirectStore(url)
    return ValkeyStore(url) if scheme in _VALKEY else FileSystemStore(url)


def _valkey_key(name: str) -> str:
    return f"carryall:kv:{name}"


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"prefix_cache_url needs {module}; install it: pip install 'carryall[shared-cache]'"
        ) from error
