"""Hosts that vanish without closing their connections; a relay that stops forwarding is the lost network."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_serving import serving
from null_llm import null_llm

from carryall.proto import generation_pb2 as pb
from carryall.proto import service_pb2_grpc
from carryall.runtime.service.grpc import server


@dataclass
class Network:
    """The way to ``there``, and whether it is lost."""

    there: tuple[str, int]
    lost: bool = False
    pipes: list[Pipe] = field(default_factory=list)


class Pipe(asyncio.Protocol):
    """One side of a forwarded connection; forwards nothing once the network is lost."""

    def __init__(self, network: Network, other: Pipe | None = None) -> None:
        self._network, self._other = network, other
        self._early = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._network.pipes.append(self)
        if self._other is None:
            self._opening = asyncio.create_task(self._open())
        else:
            self._other.found(self)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: Pipe(self._network, self), *self._network.there)

    def found(self, other: Pipe) -> None:
        self._other = other
        other.transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        elif not self._network.lost:
            self._other.transport.write(data)


@pytest.mark.long
def test_a_request_of_a_lost_host_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PING_SECONDS", 0.5)
    monkeypatch.setattr(server, "_ANSWER_SECONDS", 0.5)

    async def scenario() -> None:
        async with null_llm(max_slots=1, step_seconds=0.002) as llm, serving(llm) as served:
            host, _, port = served.address.rpartition(":")
            network = Network((host, int(port)))
            relay = await asyncio.get_running_loop().create_server(lambda: Pipe(network), "127.0.0.1", 0)
            address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            async with grpc.aio.insecure_channel(address) as channel:
                stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Generate(
                    pb.GenerateRequest(text="x", sampling={"ignore_eos": True, "max_tokens": 4000})
                )
                assert (await call.read()).token_ids
                network.lost = True
                start = time.monotonic()
                while llm.stats().running and time.monotonic() - start < 30:
                    await asyncio.sleep(0.02)
                assert (llm.stats().running, llm.stats().cancelled) == (0, 1)
                call.cancel()
            for pipe in network.pipes:
                pipe.transport.abort()
            relay.close()
            await relay.wait_closed()

    asyncio.run(scenario())
