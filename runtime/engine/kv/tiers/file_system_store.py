"""A store in a folder of a file system of fsspec."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable, Sequence

from .....errors import UsageError
from .chunk_store import imported

_AT_ONCE = 4  # contents that are read together
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})  # protocols of fsspec


class FileSystemStore:
    """A store in a folder of any file system: ``s3://bucket/folder``, ``gs://``, ``file:///mnt/nfs``.

    An object store has a content as a whole or not at all. In other file systems contents are written under
    another name and renamed. A bucket is not made: its name may be a mistake. See ``StoreClient``.

    Args:
        url: of the folder.

    Raises:
        UsageError: fsspec, or its part for this file system, is not installed; or the URL is invalid.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        fsspec = imported("fsspec")
        try:
            self._files, self._folder = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"prefix_cache_url cannot be used: {error}") from error
        protocols = self._files.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._has_objects = not _OBJECT_STORES.isdisjoint(protocols)

    def exist(self, names: Sequence[str]) -> Iterable[bool]:
        return (self._files.exists(self._path(name)) for name in names)

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        for begin in range(0, len(names), _AT_ONCE):
            paths = [self._path(name) for name in names[begin : begin + _AT_ONCE]]
            for content in self._files.cat_ranges(paths, None, None, on_error="return"):
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
                yield None if isinstance(content, Exception) else content

    def put(self, name: str, content: bytes) -> None:
        path = self._path(name)
        if self._has_objects:
            self._files.pipe_file(path, content)
            return
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        scratch = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        self._files.pipe_file(scratch, content)
        self._files.mv(scratch, path)

    def close(self) -> None:
        """Do nothing: file systems are shared."""

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}.kv"
