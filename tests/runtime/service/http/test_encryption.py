"""HTTPS: encryption, certificates of clients, and their renewal."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
from certificates import authority, write_certificate
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.service.http import server


def trusting(ca: Path, shown: trustme.LeafCert | None = None, folder: Path | None = None) -> ssl.SSLContext:
    """What a client trusts, and the certificate that it shows."""
    context = ssl.create_default_context(cafile=str(ca))
    if shown is not None and folder is not None:
        shown.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
        context.load_cert_chain(folder / "client.pem")
    return context


async def status(served: HttpServed, context: ssl.SSLContext) -> int | str:
    """The status of a request on a new connection, or the kind of its failure."""
    url = served.url.replace("http://127.0.0.1", "https://localhost")
    try:
        async with httpx2.AsyncClient(verify=context, timeout=10) as client:
            return (await client.get(f"{url}/v1/models")).status_code
    except (httpx2.ConnectError, httpx2.ReadError, httpx2.RemoteProtocolError):
        return "refused"


def settings(certificate: Path, key: Path, **more: Any) -> dict[str, Any]:
    return {"tls_certificate": certificate, "tls_key": key, **more}


def test_https_is_served_and_certificates_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_WATCH_SECONDS", 0.02)
    old, old_file = authority(tmp_path, "old.pem")
    new, new_file = authority(tmp_path, "new.pem")
    certificate, key = write_certificate(old, tmp_path)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, **settings(certificate, key)) as served:
            assert await status(served, trusting(old_file)) == 200
            assert await status(served, trusting(new_file)) == "refused"
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):  # no encryption
                await served.client.get("/health")
            with caplog.at_level(logging.WARNING):
                certificate.write_text("half-written")
                async with asyncio.timeout(30):
                    while "keeping the old one" not in caplog.text:
                        await asyncio.sleep(0.01)
            assert await status(served, trusting(old_file)) == 200
            write_certificate(new, tmp_path)
            async with asyncio.timeout(30):
                while await status(served, trusting(new_file)) != 200:
                    await asyncio.sleep(0.01)
            assert await status(served, trusting(old_file)) == "refused"

    asyncio.run(scenario())


def test_idle_connections_do_not_delay_the_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, own_file = authority(tmp_path, "own.pem")
    certificate, key = write_certificate(own, tmp_path)

    def idle(port: int) -> ssl.SSLSocket:
        """A connection after one request, whose client reads nothing more."""
        plain = socket.create_connection(("127.0.0.1", port))
        connection = trusting(own_file).wrap_socket(plain, server_hostname="localhost")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        return connection

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, **settings(certificate, key)) as served:
            port = int(served.url.rpartition(":")[2])
            with await asyncio.to_thread(idle, port):
                await served.server.stop()

    asyncio.run(scenario())
    assert "exceeded" not in caplog.text  # uvicorn's error of a stop that took CLOSING_SECONDS


def test_clients_show_certificates_of_the_present_authority(tmp_path: Path) -> None:
    own, own_file = authority(tmp_path, "own.pem")
    first, clients_file = authority(tmp_path, "clients.pem")
    second, second_file = authority(tmp_path, "second.pem")
    certificate, key = write_certificate(own, tmp_path)
    config = settings(certificate, key, tls_client_ca=clients_file)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, **config) as served:
            known = trusting(own_file, first.issue_cert("client"), tmp_path)
            other = trusting(own_file, second.issue_cert("client"), tmp_path)
            assert await status(served, known) == 200
            assert await status(served, other) == "refused"
            assert await status(served, trusting(own_file)) == "refused"
            clients_file.write_bytes(second_file.read_bytes())
            served.server.reload_certificates()
            assert await status(served, other) == 200
            assert await status(served, known) == "refused"  # no longer trusted

    asyncio.run(scenario())


def test_garbage_and_old_tls_versions_end_only_their_connection(tmp_path: Path) -> None:
    own, own_file = authority(tmp_path, "own.pem")
    certificate, key = write_certificate(own, tmp_path)
    old = trusting(own_file)
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1

    def garbage(port: int) -> None:
        for data in (b"\x16\x03\x01\x40\x00" + b"\x00" * 200, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(data)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, **settings(certificate, key)) as served:
            await asyncio.to_thread(garbage, int(served.url.rpartition(":")[2]))
            assert await status(served, old) == "refused"
            assert await status(served, trusting(own_file)) == 200

    asyncio.run(scenario())
