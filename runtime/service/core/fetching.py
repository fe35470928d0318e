"""Fetch pictures by their addresses, from the hosts that the operator names and from no others.

A name is resolved once for each connection, all of its addresses must be public, and the connection goes to
one that was checked, so a name that means another address a moment later (DNS rebinding) reaches nothing. A
redirect is a new address. See OWASP's cheat sheet "Server-Side Request Forgery Prevention".
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ....errors import RequestError
from ....options import shown
from ....records import dataclass
from ...images.data_url import is_data_url
from .caller import caller_name
from .chat import Conversation, Image, image_part
from .config import ServerConfig

MOST_REDIRECTS = 3
MOST_ADDRESSES = 128  # of a request
MOST_AT_ONCE = 4  # downloads of a caller
_MOST_HEAD = 64 * 1024
_CHUNK = 64 * 1024
_PORTS = {"https": 443, "http": 80}
_FOUND = 200
_REDIRECTS = (301, 302, 303, 307, 308)
# URL parsers disagree on other characters, and on backslashes.
_PLAIN = re.compile(r"[!-\[\]-~]{1,8192}")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that is assigned to hosts of the internet
# Of IANA's registries of special addresses, what some versions of Python take for public: protocols, relays,
# documentation, and 6to4, which holds an IPv4 address that may be a private one.
_SPECIAL = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"))
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Origin:
    """A scheme, a host in lower case and a port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of an address.

        Raises:
            RequestError: it is none of ``http`` or ``https``, or parsers of URLs would disagree on it.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise RequestError(f"the address of a picture is damaged: {error}") from error
        if not _PLAIN.fullmatch(url) or parts.scheme not in _PORTS or not host:
            raise RequestError(
                "the address of a picture must be https://HOST/PATH in plain ASCII, or http:// where the "
                f"service allows it, not {shown(url)}"
            )
        if "@" in parts.netloc:
            raise RequestError("the address of a picture holds a user name or a password; remove it")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme])

    @property
    def written(self) -> str:
        """The host as a header has it, with a port that is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        """Return the origin as a part of an address."""
        return f"{self.scheme}://{self.written}"


Connect = Callable[[str, Origin], Awaitable[Streams]]


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet, and of one host."""
    given = ipaddress.ip_address(address)
    if isinstance(given, ipaddress.IPv6Address):
        if given.ipv4_mapped is not None:
            return is_public(str(given.ipv4_mapped))
        if given not in _GLOBAL_UNICAST:
            return False
    is_special = given.is_multicast or given.is_reserved or any(given in network for network in _SPECIAL)
    return given.is_global and not is_special


async def _resolve(host: str, port: int) -> Sequence[str]:
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in answers]


async def connect_to(
    address: str, origin: Origin, context: Callable[[], ssl.SSLContext] = ssl.create_default_context
) -> Streams:
    """Connect to an IP address, and with ``https`` check that the certificate is that of the host.

    Args:
        address: the IP address.
        origin: what the connection is for.
        context: returns the TLS context; reads files.

    Raises:
        OSError: nothing listens there, or the certificate is another's.
    """
    if origin.scheme != "https":
        return await asyncio.open_connection(address, origin.port)
    trusted = await asyncio.to_thread(context)
    return await asyncio.open_connection(address, origin.port, ssl=trusted, server_hostname=origin.host)


class PictureFetcher:
    """Fetches pictures; without allowed hosts, none. Use it in one event loop only.

    Args:
        config: returns the settings in force; ``max_body_bytes`` and ``body_timeout_seconds`` limit what one
            request fetches, as they limit what it sends.

    Attributes:
        resolve: returns the IP addresses of a host and a port.
        connect: see ``connect_to``.
    """

    def __init__(self, config: Callable[[], ServerConfig] = ServerConfig) -> None:
        self.config = config
        self.resolve: Resolve = _resolve
        self.connect: Connect = connect_to
        self._callers: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def filled(self, conversation: Conversation) -> Conversation:
        """Return a conversation with the content of pictures in place of addresses; see ``fetch``."""
        urls = [image.url for image in conversation.images() if image.url]
        if not urls or not self.config().image_domains:
            return conversation
        content = await self.fetch(urls)
        return conversation.with_images(
            lambda image: replace(image, data=content[image.url], url="") if image.url else image
        )

    async def filled_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return inputs of an encoder with the content of pictures in place of addresses; see ``fetch``."""
        urls = [url for each in inputs if (url := _address(each))]
        if not urls or not self.config().image_domains:
            return inputs
        content = await self.fetch(urls)
        return [image_part(Image(content[url])) if (url := _address(each)) else each for each in inputs]

    async def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """Return the content of the addresses of one request.

        Raises:
            RequestError: a host is not allowed or not public, cannot be reached, or answers with something
                else than a file; or the request has too many addresses, or its pictures are too large or too
                slow.
        """
        config = self.config()
        different = dict.fromkeys(urls)
        if len(different) > MOST_ADDRESSES:
            raise RequestError(f"a request has {len(different)} addresses; the limit is {MOST_ADDRESSES}")
        budget = _Budget(config.max_body_bytes)
        seconds = config.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                async with asyncio.TaskGroup() as group:
                    tasks = {url: group.create_task(self._in_turn(url, budget)) for url in different}
        except TimeoutError as error:
            raise RequestError(
                f"the pictures of a request did not arrive within {seconds:g} s; send their content"
            ) from error
        except BaseExceptionGroup as error:
            raise _first(error) from error
        return {url: task.result() for url, task in tasks.items()}

    async def _in_turn(self, url: str, budget: _Budget) -> bytes:
        name = caller_name() or ""
        semaphore = self._callers.get(name)
        if semaphore is None:
            semaphore = self._callers[name] = asyncio.Semaphore(MOST_AT_ONCE)
        async with semaphore:
            return await self._followed(url, budget)

    async def _followed(self, url: str, budget: _Budget) -> bytes:
        """Return the content of an address, behind its redirects."""
        for _ in range(MOST_REDIRECTS + 1):
            answer = await self._answer(url, budget)
            if answer.status not in _REDIRECTS:
                return answer.content(Origin.of(url))
            url = urllib.parse.urljoin(url, answer.headers.get("location", ""))
        raise RequestError(f"the address of a picture is redirected more than {MOST_REDIRECTS} times")

    async def _answer(self, url: str, budget: _Budget) -> _Answer:
        origin = Origin.of(url)
        allowed = [
            Origin.of(each if "://" in each else f"https://{each}") for each in self.config().image_domains
        ]
        if origin not in allowed:
            raise RequestError(
                f"this service fetches no pictures from {origin}, only from {', '.join(map(str, allowed))}; "
                "send the content of the picture"
            )
        try:
            async with self._connected(origin) as (reader, writer):
                writer.write(_request(url, origin))
                await writer.drain()
                return await _read(reader, origin, budget)
        except OSError as error:  # also the errors of TLS and of names
            raise RequestError(f"{origin} cannot be reached: {type(error).__name__}") from error

    @asynccontextmanager
    async def _connected(self, origin: Origin) -> AsyncIterator[Streams]:
        """Connect to one of the addresses of a host.

        Raises:
            RequestError: an address is not public.
            OSError: none can be reached, or the certificate is not the host's.
        """
        addresses = await self.resolve(origin.host, origin.port)
        if not addresses or not all(map(is_public, addresses)):
            raise RequestError(f"{origin} has an address that is not public; send the content of the picture")
        reader, writer = await self._first_that_answers(addresses, origin)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _first_that_answers(self, addresses: Sequence[str], origin: Origin) -> Streams:
        for address in addresses[:-1]:
            try:
                return await self.connect(address, origin)
            except OSError:
                continue  # the error of the last address is told
        return await self.connect(addresses[-1], origin)


def _address(value: Any) -> str | None:
    """Return the address of an input of an encoder; None of one that is given by its content."""
    match value:
        case {"image_url": {"url": str(url)}} if not is_data_url(url):
            return url
    return None


class _Budget:
    """The bytes that a request may still fetch."""

    def __init__(self, most: int) -> None:
        self.most = self._left = most

    def check(self, count: int) -> None:
        """Raise RequestError if so many bytes are too many."""
        if count > self._left:
            raise RequestError(
                f"the pictures of a request have more than {self.most} bytes in all; send smaller ones"
            )

    def spend(self, count: int) -> None:
        """Count bytes that were received; see ``check``."""
        self.check(count)
        self._left -= count


def _request(url: str, origin: Origin) -> bytes:
    parts = urllib.parse.urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = (
        *(f"GET {target} HTTP/1.1", f"Host: {origin.written}", "User-Agent: carryall", "Accept: */*"),
        *("Accept-Encoding: identity", "Connection: close"),
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


class _Answer:
    """An answer of HTTP as it is read; its methods are what ``httptools`` calls."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self.headers: dict[str, str] = {}
        self.status = 0
        self.chunks: list[bytes] = []
        self.has_head = self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._budget.check(int(self.headers.get("content-length", 0)))  # the parser takes digits only
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self._budget.spend(len(data))
        self.chunks.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing in the head tells where the content ends."""
        return self.has_head and self.headers.keys().isdisjoint({"content-length", "transfer-encoding"})

    def content(self, origin: Origin) -> bytes:
        """Return the content.

        Raises:
            RequestError: it is that of an error, or is compressed.
        """
        if self.status != _FOUND:
            raise RequestError(f"{origin} answers with the status {self.status} instead of a picture")
        if (encoding := self.headers.get("content-encoding", "identity")) != "identity":
            raise RequestError(
                f"{origin} sends a picture in the encoding {shown(encoding)}; none was asked for"
            )
        return b"".join(self.chunks)


async def _read(reader: asyncio.StreamReader, origin: Origin, budget: _Budget) -> _Answer:
    """Return an answer; of one that is no picture, the head.

    Raises:
        RequestError: it is no HTTP, its head or its content is too large, or it is cut off.
    """
    import httptools

    answer, received = _Answer(budget), 0
    parser: Any = httptools.HttpResponseParser(answer)
    while not answer.is_complete:
        data = await reader.read(_CHUNK)
        if not data and not answer.ends_with_connection:
            raise RequestError(f"{origin} closes the connection before the end of a picture")
        if not data:
            break
        received += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None  # the budget's
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise RequestError(f"{origin} does not answer in HTTP: {type(error).__name__}") from error
        if answer.has_head:
            answer.status = parser.get_status_code()
            if answer.status != _FOUND:
                break
        elif received > _MOST_HEAD:
            raise RequestError(f"{origin} sends a head of more than {_MOST_HEAD} bytes")
    return answer


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
