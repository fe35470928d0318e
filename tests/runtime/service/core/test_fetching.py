"""Pictures are fetched from named hosts only, at public addresses only, and within limits."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from certificates import authority
from internet import HOSTS, PUBLIC, Answer, Net, found, says

from carryall.errors import RequestError, UsageError
from carryall.runtime.service.core.caller import CALLER, Caller
from carryall.runtime.service.core.chat import Conversation, FunctionResult, Image, Message, Text, VideoFrames
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.fetching import Origin, Streams, is_public


def moved(*locations: str) -> Answer:
    """Redirects to each location in turn, then a picture."""
    left = list(locations)

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        location = left.pop(0) if left else None
        head_of = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        writer.write(head_of if location else found(b"picture"))
        await writer.drain()

    return answer


def fetch(net: Net, *urls: str, **config: Any) -> dict[str, bytes]:
    async def scenario() -> dict[str, bytes]:
        async with net.fetcher(**config) as fetcher:
            return await fetcher.fetch(urls)

    return asyncio.run(scenario())


URL = "http://plain.example/a/b.png?size=2#part"


@pytest.mark.parametrize(
    "data",
    [
        found(b"picture"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npict\r\n3\r\nure\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\npicture",
    ],
    ids=["length", "chunked", "until the end"],
)
def test_a_picture_of_an_allowed_host_is_fetched_from_the_address_that_was_checked(data: bytes) -> None:
    net = Net(says(data))
    assert fetch(net, URL) == {URL: b"picture"}
    assert (net.lookups, net.connected) == (["plain.example"], [(PUBLIC, 80)])
    first, *headers = net.asked[0].decode().split("\r\n")
    assert first == "GET /a/b.png?size=2 HTTP/1.1"
    assert "Host: plain.example" in headers
    assert not [line for line in headers if line.lower().startswith(("cookie", "authorization"))]


TRICKS = [
    "https://evil.example/a.png",
    "https://pictures.example.evil.example/",
    "https://evil.example/pictures.example",
    "https://evil.example?pictures.example",
    "https://evil.example#pictures.example",
    "https://evil.example#@pictures.example/",
    "https://user@pictures.example/",
    "https://pictures.example@evil.example/",
    "https://pictures.example:443@evil.example/",
    "https://pictures.example%40evil.example/",
    "https://evil.example\\@pictures.example/",
    "https://pictures.example\\.evil.example/",
    "https://pictures.example\t.evil.example/",
    "https://pictures.example\n/",
    "https://pictures.example /",
    "\thttps://pictures.example/",
    "https:/pictures.example/",
    "https:pictures.example",
    "//pictures.example/",
    "https:///pictures.example/",
    "https://pictures.example./",
    "https://pictures.example:8443/",
    "https://pictures.example:0x1bb/",
    "https://pictures.example:99999/",
    "http://pictures.example/",
    "https://plain.example/",
    "http://plain.example:81/",
    "https://127.0.0.1/",
    "https://2130706433/",
    "https://0x7f.1/",
    "https://0177.0.0.1/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[fe80::1%25eth0]/",
    "https://localhost/",
    "https://169.254.169.254/latest/meta-data/",
    "https://picture\u017f.example/",
    "https://\uff50\uff49ctures.example/",
    "https://pictures\u3002example/",
    "file:///etc/passwd",
    "ftp://pictures.example/",
    "gopher://pictures.example/",
    "jar:https://pictures.example!/",
    "unix:/run/x.sock",
    "https://",
    "https://[pictures.example/",
]


@pytest.mark.parametrize("url", TRICKS)
def test_no_writing_of_an_address_reaches_another_host(url: str) -> None:
    net = Net(says(found(b"secret")))
    with pytest.raises(RequestError, match=r"address of a picture|fetches no pictures from"):
        fetch(net, url)
    assert (net.lookups, net.connected) == ([], [])


def test_hosts_are_compared_in_lower_case_and_with_the_port_of_the_scheme() -> None:
    net = Net(says(found(b"picture")))
    urls = ("http://PLAIN.example:80/x", "http://plain.EXAMPLE:8080/")
    assert fetch(net, *urls) == dict.fromkeys(urls, b"picture")
    assert sorted(net.connected) == [(PUBLIC, 80), (PUBLIC, 8080)]
    assert any(b"Host: plain.example:8080\r\n" in head for head in net.asked)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.9.1",
            "0.0.0.1",
            "192.88.99.1",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
        ),
        *(
            "169.254.169.254",
            "100.64.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "198.18.0.1",
            "198.51.100.7",
            "203.0.113.9",
        ),
        *("224.0.0.1", "239.255.255.250", "233.252.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12:3456::1", "ff02::1", "ff0e::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::ffff:0:127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::5db8:d822", "64:ff9b:1::1", "2002:7f00:1::", "2002:5db8:d822::1"),
        *("2001::1", "2001:db8::1", "100::1", "5f00::1", "3fff:1::1", "4000::1"),
    ],
)
def test_a_host_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        net = Net(says(found(b"secret")), {"plain.example": [addresses]})
        with pytest.raises(RequestError, match="not public"):
            fetch(net, URL)
        assert net.connected == []


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


def test_a_name_that_means_another_address_a_moment_later_reaches_nothing() -> None:
    net = Net(says(found(b"picture")), {"plain.example": [[PUBLIC], ["127.0.0.1"]]})
    assert fetch(net, URL) == {URL: b"picture"}
    assert net.connected == [(PUBLIC, 80)]  # the address of the first and only look-up
    again = Net(moved("http://plain.example/next"), {"plain.example": [[PUBLIC], ["127.0.0.1"]]})
    with pytest.raises(RequestError, match="not public"):
        fetch(again, URL)
    assert again.connected == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://127.0.0.1/", "fetches no pictures from http://127.0.0.1"),
        ("http://evil.example/", "fetches no pictures from http://evil.example"),
        ("//evil.example/x", "fetches no pictures from http://evil.example"),
        ("http://user@plain.example/", "user name"),
        ("file:///etc/passwd", "must be https"),
        ("gopher://plain.example/", "must be https"),
        ("http://plain.example\\@evil.example/", "must be https"),
        ("http://pictures.example/", "fetches no pictures from http://pictures.example"),
    ],
)
def test_a_redirect_is_checked_as_an_address_of_a_request(location: str, why: str) -> None:
    net = Net(moved(location))
    with pytest.raises(RequestError, match=why):
        fetch(net, URL)
    assert net.lookups == ["plain.example"]


def test_redirects_are_followed_to_a_limit() -> None:
    net = Net(moved("/c.png", "http://plain.example:8080/d.png", "e.png"))
    assert fetch(net, URL) == {URL: b"picture"}
    targets = [head.split(b" ")[1] for head in net.asked]
    assert targets == [b"/a/b.png?size=2", b"/c.png", b"/d.png", b"/e.png"]
    assert [port for _, port in net.connected] == [80, 80, 8080, 8080]
    with pytest.raises(RequestError, match="more than 3 times"):
        fetch(Net(moved("/1", "/2", "/3", "/4")), URL)


async def drip(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silence(head: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def endless_head(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def endless(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


BAD: list[tuple[str, Answer, str]] = [
    ("drip", drip, "did not arrive within 0.3 s"),
    ("silence", silence, "did not arrive within 0.3 s"),
    ("endless head", endless_head, "a head of more than 65536 bytes"),
    ("endless", endless, "more than 2048 bytes in all"),
    ("large", says(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n"), "more than 2048 bytes in all"),
    ("cut", says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npict"), "before the end of a picture"),
    ("closed", says(b""), "before the end of a picture"),
    ("missing", says(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret"), "status 404"),
    ("other protocol", says(b"SSH-2.0-OpenSSH\r\n\r\n"), "does not answer in HTTP"),
    ("damaged", says(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"), "does not answer in HTTP"),
    ("compressed", says(found(b"\x1f\x8b", "Content-Encoding: gzip")), "in the encoding 'gzip'"),
    ("nowhere", says(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"), "more than 3 times"),
]


@pytest.mark.parametrize(("answer", "why"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_a_bad_answer_is_an_error_that_says_why(answer: Answer, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match=why) as refused:
        fetch(Net(answer), URL, max_body_bytes=2048, body_timeout_seconds=0.3)
    assert "secret" not in str(refused.value)
    assert time.monotonic() - began < 20


def test_the_pictures_of_a_request_are_limited_together() -> None:
    urls = [f"http://plain.example/{number}" for number in range(3)]
    net = Net(says(found(b"x" * 1000)))
    assert len(fetch(net, *urls[:2], max_body_bytes=2048)) == 2
    with pytest.raises(RequestError, match="more than 2048 bytes in all"):
        fetch(net, *urls, max_body_bytes=2048)
    with pytest.raises(RequestError, match="129 addresses; the limit is 128"):
        fetch(net, *(f"{URL}{number}" for number in range(129)))


def test_an_address_is_fetched_once_for_a_request_and_four_at_a_time_for_a_caller() -> None:
    together, most = 0, 0
    several = asyncio.Event()

    async def count(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.02)
        together -= 1
        several.set()
        writer.write(found(b"picture"))
        await writer.drain()

    net = Net(count)

    async def scenario() -> None:
        async with net.fetcher() as fetcher:
            CALLER.set(Caller("one", ()))
            first = fetcher.fetch([f"http://plain.example/{number % 6}" for number in range(12)])
            await asyncio.gather(first, fetcher.fetch([URL]))

    asyncio.run(scenario())
    assert (len(net.asked), most) == (7, 4)


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    net = Net(says(found(b"picture")), {"plain.example": [["8.8.4.4", PUBLIC]]})
    through = net.connect

    async def connect(address: str, origin: Origin) -> Streams:
        if address == "8.8.4.4":
            raise ConnectionRefusedError
        return await through(address, origin)

    async def scenario(hosts: list[str]) -> dict[str, bytes]:
        net.names["plain.example"] = [hosts]
        async with net.fetcher() as fetcher:
            fetcher.connect = connect
            return await fetcher.fetch([URL])

    assert asyncio.run(scenario(["8.8.4.4", PUBLIC])) == {URL: b"picture"}
    with pytest.raises(RequestError, match="cannot be reached: ConnectionRefusedError"):
        asyncio.run(scenario(["8.8.4.4"]))


def test_the_certificate_must_be_that_of_the_host(tmp_path: Path) -> None:
    own, own_file = authority(tmp_path, "own.pem")

    def run(name: str, issuer: trustme.CA) -> dict[str, bytes]:
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issuer.issue_cert(name).configure_cert(shown)
        net = Net(says(found(b"picture")))
        net.trusted = ssl.create_default_context(cafile=str(own_file))

        async def scenario() -> dict[str, bytes]:
            async with net.fetcher(shown) as fetcher:
                return await fetcher.fetch(["https://pictures.example/a"])

        return asyncio.run(scenario())

    assert run("pictures.example", own) == {"https://pictures.example/a": b"picture"}
    for name, issuer in (("evil.example", own), ("pictures.example", trustme.CA())):
        with pytest.raises(RequestError, match="cannot be reached: SSLCertVerificationError"):
            run(name, issuer)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    net = Net(says(found(b"picture")))
    assert fetch(net, URL) == {URL: b"picture"}
    assert net.connected == [(PUBLIC, 80)]


def test_all_pictures_of_a_conversation_are_filled_and_nothing_is_without_hosts() -> None:
    net = Net(says(found(b"picture")))
    given, image, here = Image(url=URL), Image(b"picture"), Image(b"here")

    def conversation(image: Image) -> Conversation:
        frames, result = VideoFrames((image, here), 2), FunctionResult((Text("t"), image), "id", "name")
        return Conversation([Message("user", (Text("a"), image, frames)), Message("tool", (result,))])

    async def scenario(**config: Any) -> Conversation:
        async with net.fetcher(**config) as fetcher:
            return await fetcher.filled(conversation(given))

    assert asyncio.run(scenario()) == conversation(image)
    assert len(net.asked) == 1
    assert asyncio.run(scenario(image_domains=())) == conversation(given)
    assert len(net.asked) == 1


@pytest.mark.parametrize(
    "domain", ["", "*", "*.example", "ftp://a.example", "https://a.example/x", "a b", "A.example", "u@a"]
)
def test_a_domain_that_cannot_be_one_is_refused(domain: str) -> None:
    with pytest.raises(UsageError, match="an image domain must be HOST"):
        ServerConfig(image_domains=(domain,))


def test_the_settings_in_force_decide() -> None:
    net, settings = (
        Net(says(found(b"picture"))),
        [ServerConfig(image_domains=HOSTS), ServerConfig(image_domains=("a.example",))],
    )

    async def scenario() -> None:
        async with net.fetcher() as fetcher:
            fetcher.config = functools.partial(settings.pop, 0)
            await fetcher.fetch([URL])

    with pytest.raises(RequestError, match=r"only from https://a\.example"):
        asyncio.run(scenario())
