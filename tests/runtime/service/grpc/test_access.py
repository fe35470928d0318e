"""Who may call: API keys, certificates of both sides, and their renewal."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import authority, write_certificate
from grpc_serving import code_of, read, serving
from null_llm import null_llm

from carryall.client import TLS, AccessError, AsyncClient
from carryall.errors import ServiceUnavailableError, UnknownModelError, UsageError
from carryall.proto import generation_pb2, kserve_pb2, kserve_pb2_grpc, models_pb2
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.grpc.server import GrpcServer

SHORT: Any = {"max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    def table(name: str, key: str, models: str = "") -> str:
        return f'[{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{models}\n'

    path = tmp_path / "keys.toml"
    path.write_text(table("all", "key-1") + table("none", "key-2", 'models = ["other"]'))
    return path


def test_only_known_keys_are_answered(keys: Path) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm, api_keys=keys) as served:
            unauthenticated = grpc.StatusCode.UNAUTHENTICATED
            assert await served.health_status() == "SERVING"
            request = generation_pb2.GenerateRequest(text="x", sampling=SHORT)
            assert (await code_of(read(served.stub.Generate(request))))[0] == unauthenticated
            code, details = await code_of(served.stub.ListModels(models_pb2.ListModelsRequest()))
            assert (code, "API key" in details) == (unauthenticated, True)
            async with AsyncClient(served.address, api_key="key-1") as client:
                assert (await client.generate("x", **SHORT)).text
            async with AsyncClient(served.address, api_key="wrong", attempts=1) as client:
                with pytest.raises(AccessError, match="valid API key"):
                    await client.generate("x", **SHORT)
            other = served.stub.ListModels(models_pb2.ListModelsRequest(), metadata=(("x-api-key", "key-1"),))
            assert len((await other).models) == 1
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                assert (await stub.ServerLive(kserve_pb2.ServerLiveRequest())).live
                stream = stub.ModelStreamInfer(iter([kserve_pb2.ModelInferRequest()]))
                assert (await code_of(read(stream)))[0] == unauthenticated

    asyncio.run(scenario())


def test_a_key_sees_its_models_only(keys: Path) -> None:
    async def scenario() -> None:
        async with (
            null_llm() as llm,
            serving(llm, api_keys=keys) as served,
            AsyncClient(served.address, api_key="key-2") as client,
        ):
            assert await client.models() == []
            assert await client.stats() == []
            calls: list[Callable[[], Any]] = [
                lambda: client.generate("x", **SHORT),
                lambda: client.tokenize("x"),
                lambda: client.stats("toy"),
                lambda: client.load("toy"),
                lambda: client.unload("toy"),
            ]
            for call in calls:
                with pytest.raises(UnknownModelError):
                    await call()

    asyncio.run(scenario())


def test_the_services_limits_hold() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm, max_choices=2, max_logprobs=3) as served:
            for sampling, message in (({"n": 3}, "n is 3"), ({"logprobs": 4}, "at most 3")):
                request = generation_pb2.GenerateRequest(text="x", sampling=sampling)
                code, details = await code_of(read(served.stub.Generate(request)))
                assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details

    asyncio.run(scenario())


def test_connections_are_encrypted_and_certificates_renewed(tmp_path: Path) -> None:
    old, old_file = authority(tmp_path, "old.pem")
    new, new_file = authority(tmp_path, "new.pem")
    certificate, key = write_certificate(old, tmp_path)

    async def works(address: str, ca: Path) -> None:
        target = address.replace("127.0.0.1", "localhost")
        async with AsyncClient(target, tls=TLS(ca=ca), attempts=1, timeout=10) as client:
            assert (await client.generate("x", **SHORT)).text

    async def scenario() -> None:
        settings: Any = {"tls_certificate": certificate, "tls_key": key, "host": "127.0.0.1"}
        async with null_llm() as llm, serving(llm, **settings) as served:
            await works(served.address, old_file)
            with pytest.raises(ServiceUnavailableError):
                await works(served.address, new_file)
            async with AsyncClient(served.address, attempts=1, timeout=10) as client:
                with pytest.raises(ServiceUnavailableError):  # without encryption
                    await client.models()
            certificate.write_text("half-written")
            await works(served.address, old_file)
            write_certificate(new, tmp_path)
            await works(served.address, new_file)

    asyncio.run(scenario())


def test_clients_show_certificates(tmp_path: Path) -> None:
    own, own_file = authority(tmp_path, "own.pem")
    clients, clients_file = authority(tmp_path, "clients.pem")
    certificate, key = write_certificate(own, tmp_path)
    shown = clients.issue_cert("client")
    shown.private_key_pem.write_to_path(tmp_path / "client.key")
    shown.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
    good = TLS(
        ca=own_file, certificate=tmp_path / "client.pem", key=tmp_path / "client.key", server_name="localhost"
    )

    async def scenario() -> None:
        settings: Any = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": clients_file}
        async with null_llm() as llm, serving(llm, **settings) as served:
            async with AsyncClient(served.address, tls=good, timeout=10) as client:
                assert (await client.generate("x", **SHORT)).text
            nobody = TLS(ca=own_file, server_name="localhost")
            async with AsyncClient(served.address, tls=nobody, attempts=1, timeout=10) as client:
                with pytest.raises(ServiceUnavailableError):
                    await client.models()

    asyncio.run(scenario())


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    config = ServerConfig(grpc_port=0, tls_certificate=tmp_path / "x", tls_key=tmp_path / "x")

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            server = GrpcServer(served.models, config)
            with pytest.raises(UsageError, match="not a certificate and its key"):
                await server.start()

    asyncio.run(scenario())
    with pytest.raises(UsageError, match="must be given together"):
        TLS(certificate="x").credentials()
    with pytest.raises(UsageError, match="cannot read"):
        TLS(ca=tmp_path / "none").credentials()
