"""Chunks that one service keeps in its memory and others read over gRPC, without a server between them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from typing import Any

from .....errors import UsageError
from .....options import declared, option
from .....records import dataclass
from ...requests.prefill_client import PREFILL_KEY_VARIABLE
from .chunk_store import Content, last_name, names_held

SERVED, DIRECT = "serve", "grpc"  # schemes of ``prefix_cache_url``
_SECONDS = 5.0  # then a call fails
_UNLIMITED = [("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class _Size:
    """The host of ``serve://SIZE``."""

    size: int = option(2**32, least=1, unit="bytes")


class ServedStore:
    """A store in the memory of this process, for ``ChunkService``; it evicts the least recently used chunks.

    Args:
        url: ``serve://4GB``, the most bytes of all chunks.

    Raises:
        UsageError: the size is invalid.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        text = url.partition("://")[2]
        self._most: int = declared(_Size)["size"].parse(text, "prefix_cache_url") if text else _Size().size
        self._chunks: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # the service's threads read, the tier's write

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which names have a content."""
        with self._lock:
            return [name in self._chunks for name in names]

    def held(self, names: Sequence[str], seconds: float) -> int:
        return names_held(self.exist(names))

    def last_held(self, names: Sequence[str], seconds: float) -> int:
        return last_name(self.exist(names[::-1]), len(names))

    def read(self, name: str, ahead: Sequence[str], seconds: float) -> Content | None:
        return self.get(name)

    def forget(self) -> None:
        """Do nothing: nothing is read ahead."""

    def has(self, name: str) -> bool:
        return all(self.exist([name]))

    def get(self, name: str) -> bytes | None:
        """Return a content, None if there is none."""
        with self._lock:
            if name in self._chunks:
                self._chunks.move_to_end(name)
            return self._chunks.get(name)

    def put(self, name: str, content: bytes) -> None:
        """Store a content; one that is larger than the store is dropped."""
        with self._lock:
            self._bytes += len(content) - len(self._chunks.pop(name, b""))
            self._chunks[name] = content
            while self._bytes > self._most:
                _, evicted = self._chunks.popitem(last=False)
                self._bytes -= len(evicted)

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._chunks.clear()
            self._bytes = 0


class DirectStore:
    """The store of another service, read over gRPC: ``grpc://host:8001``, or ``grpcs://`` with TLS.

    What this service computes stays with it. The API key is that in ``CARRYALL_PREFILL_KEY``.

    Args:
        url: of the service.

    Raises:
        UsageError: gRPC is not installed, or the URL is invalid.
    """

    read_only = True

    def __init__(self, url: str) -> None:
        try:
            import grpc

            from .....proto import kv_pb2, kv_pb2_grpc
        except ImportError as error:
            raise UsageError(
                "prefix_cache_url grpc:// needs grpcio; install it: pip install 'carryall[service]'"
            ) from error
        scheme, _, address = url.partition("://")
        host, _, port = address.rstrip("/").rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"prefix_cache_url must be a URL such as grpc://host:8001, not {url!r}")
        self._messages, self._missing = kv_pb2, grpc.StatusCode.NOT_FOUND
        self._error: Any = grpc.RpcError  # a call raises one with a code and details
        target = f"{host}:{port}"
        self._channel: Any = (
            grpc.insecure_channel(target, _UNLIMITED)
            if scheme == DIRECT
            else grpc.secure_channel(target, grpc.ssl_channel_credentials(), _UNLIMITED)
        )
        self._stub: Any = kv_pb2_grpc.ChunkServiceStub(self._channel)  # type: ignore[no-untyped-call]
        key = os.environ.get(PREFILL_KEY_VARIABLE)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return whether each name has a content, by one exchange."""
        request = self._messages.FindChunksRequest(names=names)
        try:
            answer = self._stub.FindChunks(request, timeout=_SECONDS, metadata=self._metadata)
        except self._error as error:
            raise _failure(error) from error
        return list(answer.found)

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        """Yield the content of each name, in order, with two requests on their way."""
        calls = deque[Any]()
        try:
            for i in range(len(names) + 1):
                if i < len(names):
                    request = self._messages.ReadChunkRequest(name=names[i])
                    calls.append(self._stub.ReadChunk(request, timeout=_SECONDS, metadata=self._metadata))
                if i:
                    yield self._content(calls.popleft())
        finally:
            for call in calls:
                call.cancel()

    def put(self, name: str, content: bytes) -> None:
        """Do nothing: the store belongs to the other service."""

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _content(self, pieces: Any) -> bytes | None:
        try:
            return b"".join(piece.content for piece in pieces)
        except self._error as error:
            if error.code() == self._missing:
                return None
            raise _failure(error) from error


def _failure(error: Any) -> ConnectionError:
    """Return what a call failed with, in one line; gRPC's own text has five."""
    return ConnectionError(f"{error.code().name}: {error.details()}")
