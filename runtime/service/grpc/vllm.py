"""`vllm.grpc.engine.VllmEngine`: vLLM's engine protocol, which routers use. Serves the default model."""

from __future__ import annotations

import importlib.metadata
import json
import time
from contextlib import aclosing
from datetime import UTC, datetime

from ....errors import RequestError
from ....proto import vllm_engine_pb2 as pb
from ....proto import vllm_engine_pb2_grpc
from ..access.admission import Admission
from .statuses import Context, errors_as_status
from .vllm_messages import GenerationWriter, generation_request


class EngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Implements the protocol's methods for the default model; the method names are the protocol's.

    Args:
        models: the models. Requests of this protocol have no model name.
    """

    def __init__(self, models: Admission) -> None:
        self._models = models
        self._start, self._last_request = time.monotonic(), 0.0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream the continuation of a prompt."""
        async with errors_as_status(context):
            self._last_request = time.time()
            handler = await self._models.llm()
            wanted = self._models.admitted(generation_request(request))
            prompt = (
                await handler.tokenize(wanted.prompt) if wanted.params.prompt_logprobs is not None else []
            )
            writer = GenerationWriter(stream=request.stream, params=wanted.params)
            async with aclosing(handler.generate(wanted)) as deltas:
                async for delta in deltas:
                    if delta.opens:
                        await context.send_initial_metadata(())
                    for response in writer.responses(delta, prompt):
                        await context.write(response)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Return the embedding of a prompt."""
        async with errors_as_status(context):
            self._last_request = time.time()
            if not request.tokenized.input_ids:
                raise RequestError("the request has no tokens")
            handler = await self._models.llm()
            found = await handler.embed([list(request.tokenized.input_ids)])
            vector = found.vectors[0].tolist()
            return pb.EmbedResponse(
                embedding=vector, prompt_tokens=found.prompt_tokens, embedding_dim=len(vector)
            )

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Return whether at least one model accepts requests and none is loading."""
        ready = self._models.ready
        return pb.HealthCheckResponse(
            healthy=ready, message="ready" if ready else "not every model is loaded"
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Cancel requests; unknown ids are ignored."""
        async with errors_as_status(context):
            handler = await self._models.llm()
            for request_id in request.request_ids:
                handler.abort(request_id)
            return pb.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Return facts of the default model."""
        async with errors_as_status(context):
            handler = self._models.serving().language_model()
            return pb.GetModelInfoResponse(
                model_path=handler.name,
                served_model_name=handler.name,
                is_generation=True,
                max_context_length=handler.info.context_length,
                max_req_input_len=handler.info.context_length,
                vocab_size=handler.info.vocab_size,
                eos_token_ids=sorted(handler.llm.end_token_ids),
                default_sampling_params_json=json.dumps(dict(handler.defaults)),
            )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return facts of the server."""
        async with errors_as_status(context):
            stats = self._models.serving().language_model().stats()
            return pb.GetServerInfoResponse(
                active_requests=stats.running + stats.waiting,
                last_receive_timestamp=self._last_request,
                uptime_seconds=time.monotonic() - self._start,
                server_type="carryall-grpc",
                data_parallel_size=1,
                max_num_seqs=stats.slots,
            )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        """Return the load of the engine."""
        async with errors_as_status(context):
            stats = self._models.serving().language_model().stats()
            load = pb.SchedulerLoad(
                num_running_reqs=stats.running,
                num_waiting_reqs=stats.waiting,
                num_total_reqs=stats.running + stats.waiting,
                num_used_tokens=stats.kv_tokens - stats.idle_kv_tokens,
                max_running_requests=stats.slots,
            )
            return pb.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=importlib.metadata.version("carryall"),
                dp_rank_count=1,
                loads=[load] if not request.dp_rank else [],
            )
