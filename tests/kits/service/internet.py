"""A stand-in for the internet, from which a service fetches pictures."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.fetching import Origin, PictureFetcher, Streams, connect_to

PUBLIC = "93.184.216.34"
HOSTS = ("pictures.example", "http://plain.example", "http://plain.example:8080")
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Net:
    """Names with their addresses, and one local server behind all of them.

    Attributes:
        lookups: the names that were asked for.
        connected: the addresses and ports that connections were made to.
        asked: the heads of the requests.
    """

    def __init__(self, answer: Answer, names: dict[str, list[list[str]]] | None = None) -> None:
        self.answer, self.names = answer, names or {}
        self.lookups: list[str] = []
        self.connected: list[tuple[str, int]] = []
        self.asked: list[bytes] = []
        self.trusted: ssl.SSLContext | None = None

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, origin: Origin) -> Streams:
        self.connected.append((address, origin.port))
        local = dataclasses.replace(origin, port=self.port)
        trusted = self.trusted
        if trusted is None:
            return await connect_to("127.0.0.1", local)
        return await connect_to("127.0.0.1", local, lambda: trusted)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            await self.answer(head, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    @asynccontextmanager
    async def behind(
        self, fetcher: PictureFetcher, shown: ssl.SSLContext | None = None
    ) -> AsyncIterator[PictureFetcher]:
        """Answer a fetcher's connections, with a certificate if a TLS context shows one."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=shown)
        self.port = server.sockets[0].getsockname()[1]
        fetcher.resolve, fetcher.connect = self.resolve, self.connect
        async with server:
            yield fetcher

    @asynccontextmanager
    async def fetcher(
        self, shown: ssl.SSLContext | None = None, **config: Any
    ) -> AsyncIterator[PictureFetcher]:
        """A fetcher with settings, which reaches this server only."""
        settings = ServerConfig(**{"image_domains": HOSTS, **config})
        async with self.behind(PictureFetcher(lambda: settings), shown) as fetcher:
            yield fetcher


def says(data: bytes) -> Answer:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def found(content: bytes, *headers: str) -> bytes:
    lines = ("HTTP/1.1 200 OK", f"Content-Length: {len(content)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
