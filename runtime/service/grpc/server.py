"""A gRPC server with health checking and reflection, bound to one address."""

from __future__ import annotations

import os

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ....errors import UsageError
from ....proto import (
    kserve_pb2,
    kserve_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from ...process.threads import check_new_threads
from ..access.tls import Tls
from ..core.config import ServerConfig
from ..core.repository import ModelRepository
from ..kserve.inference import Inference
from .callers import CallerInterceptor
from .calls import Calls
from .chunks import ChunkServicer
from .credentials import server_credentials
from .kserve import InferenceServicer
from .service import GenerationServicer
from .vllm import EngineServicer

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
VLLM = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNKS = kv_pb2.DESCRIPTOR.services_by_name["ChunkService"].full_name
SERVICES = (SERVICE, KSERVE, VLLM, CHUNKS)
# Time for endless calls, such as Health.Watch, to end at shutdown.
CLOSING_SECONDS = 0.2
# gRPC starts a thread per core (4 to 16) for events, and a few for timers; if it cannot, it tries for ever.
_THREADS = min(max(os.cpu_count() or 1, 4), 16) + 4
# The connection of a host that answers no ping ends, and its requests with it.
_PING_SECONDS, _ANSWER_SECONDS = 60.0, 20.0
# gRPC cancels calls that no handler has taken after 30 s, as on a host whose processor is starved. Clients
# cannot tell that from a cancellation of their own, and do not retry; their deadlines end calls anyway.
_UNTAKEN_SECONDS = 86_400


class GrpcServer:
    """Serves the models of a repository; its health is SERVING from `set_serving` until `set_stopping`.

    Args:
        models: the repository.
        config: the service's settings.
        inference: the Open Inference Protocol service, shared with other transports; None makes one.
    """

    def __init__(
        self, models: ModelRepository, config: ServerConfig, inference: Inference | None = None
    ) -> None:
        self._config = config
        options = [
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", config.max_body_bytes),
            ("grpc.so_reuseport", 0),  # 1 lets a second server bind the port and get half the calls
            ("grpc.keepalive_time_ms", int(_PING_SECONDS * 1000)),
            # The limit of every ping (60 s by default); grpc.keepalive_timeout_ms ended no connection.
            ("grpc.http2.ping_timeout_ms", int(_ANSWER_SECONDS * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),  # idle connections end too
            ("grpc.server_max_unrequested_time_in_server", _UNTAKEN_SECONDS),
            ("grpc.http2.max_pings_without_data", 0),  # no limit: a request may wait long in the queue
        ]
        inference = inference or Inference.of(models, config)
        admission = inference.models
        interceptors: list[grpc.aio.ServerInterceptor] = [Calls(SERVICES)]
        if admission.policy.keys is not None:
            interceptors.append(CallerInterceptor(admission.policy.keys))
        check_new_threads(_THREADS)
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._health = health.aio.HealthServicer()
        service_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            GenerationServicer(admission), self._server
        )
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceServicer(inference), self._server
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(  # type: ignore[no-untyped-call]
            EngineServicer(admission), self._server
        )
        kv_pb2_grpc.add_ChunkServiceServicer_to_server(  # type: ignore[no-untyped-call]
            ChunkServicer(admission), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> str:
        """Listen with health NOT_SERVING, and return the address as `host:port`.

        Raises:
            UsageError: the address cannot be bound, or a certificate cannot be used.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.grpc_port}"
        try:
            port = self._bind(address)
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {address}: the port is taken or not allowed, or the host is not an "
                "address of this machine; choose another with --grpc-port or --host"
            ) from error
        await self._server.start()
        return f"{host}:{port}"

    def _bind(self, address: str) -> int:
        tls = Tls.of(self._config)
        if tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(tls))

    async def set_serving(self) -> None:
        """Set the health to SERVING."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def set_stopping(self) -> None:
        """Set the health to NOT_SERVING for the rest of the process."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Close the port and end the remaining calls; drain the repository before."""
        await self._server.stop(CLOSING_SECONDS)

    async def _set_health(self, status: int) -> None:
        for service in ("", *SERVICES):
            await self._health.set(service, status)
