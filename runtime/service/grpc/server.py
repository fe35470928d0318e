"""A gRPC server with health checking and reflection, bound to one address."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ....errors import UsageError
from ....proto import (
    kserve_pb2,
    kserve_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from ..core.admission import Admission
from ..core.api_keys import ApiKeys
from ..core.config import ServerConfig
from ..core.repository import ModelRepository
from ..core.tls import Tls
from ..kserve.inference import Inference
from .callers import Callers
from .credentials import server_credentials
from .decoding import Decoding
from .kserve import InferenceServicer
from .service import GenerationServicer
from .vllm import EngineServicer

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
VLLM = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVICES = (SERVICE, KSERVE, VLLM)
# Calls without an end of their own, such as Health.Watch, get this long to notice the shutdown.
CLOSING_SECONDS = 0.2


class GrpcServer:
    """Serves the models of a repository; healthy from `set_serving` until `set_stopping`.

    Args:
        models: the repository.
        config: where to listen, for whom, and within which limits.
        inference: the Open Inference Protocol, shared with other transports; None makes one.
    """

    def __init__(
        self, models: ModelRepository, config: ServerConfig, inference: Inference | None = None
    ) -> None:
        self._config = config
        options = [
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", config.max_body_bytes),
            ("grpc.so_reuseport", 0),  # else a second server binds the same port and steals half the calls
        ]
        interceptors: list[grpc.aio.ServerInterceptor] = [Decoding(SERVICES)]
        if config.api_keys is not None:
            interceptors.insert(0, Callers(ApiKeys(config.api_keys)))
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        admission = Admission(models, config)
        self._health = health.aio.HealthServicer()
        service_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            GenerationServicer(admission), self._server
        )
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceServicer(inference or Inference.of(models, config)), self._server
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(  # type: ignore[no-untyped-call]
            EngineServicer(admission), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> str:
        """Listen, not healthy yet; return the address, `host:port`.

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
                f"cannot listen on {address}: is the port taken, the host this machine's, the port allowed? "
                "Choose another with --grpc-port or --host"
            ) from error
        await self._server.start()
        return f"{host}:{port}"

    def _bind(self, address: str) -> int:
        tls = Tls.of(self._config)
        if tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(tls))

    async def set_serving(self) -> None:
        """Report healthy."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def set_stopping(self) -> None:
        """Report unhealthy from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Close the port and end what is left; the repository has been drained before."""
        await self._server.stop(CLOSING_SECONDS)

    async def _set_health(self, status: int) -> None:
        for service in ("", *SERVICES):
            await self._health.set(service, status)
