"""`inference.GRPCInferenceService`: the Open Inference Protocol (KServe v2) with Triton's extensions."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ....errors import CarryallError, RequestError, UnsupportedTaskError
from ....proto import kserve_pb2 as pb
from ....proto import kserve_pb2_grpc
from ..core.caller import CALLER
from ..core.model_entry import ModelState, ModelStatus
from ..kserve.inference import EXTENSIONS, Inference
from ..kserve.messages import ModelFacts, TensorFacts
from ..kserve.statistics import BatchCounts, ModelCounts
from .kserve_messages import OutputPlaces, inference_request, inference_response
from .statuses import Context, errors_as_status

_STATES: dict[ModelState, str] = {
    "ready": "READY",
    "loading": "LOADING",
    "unloading": "UNLOADING",
    "unloaded": "UNAVAILABLE",
    "failed": "UNAVAILABLE",
}
# Maximum number of concurrent requests of one stream. Further requests are read when one has ended.
_MOST_OF_A_STREAM = 256


class InferenceServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Implements the protocol's methods; the method names are the protocol's.

    Args:
        inference: runs the requests.
    """

    def __init__(self, inference: Inference) -> None:
        self._inference, self._memory = inference, inference.memory

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        """Return true."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: N802
        """Return whether at least one model accepts requests and none is loading."""
        return pb.ServerReadyResponse(ready=self._inference.models.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        """Return whether a model accepts requests."""
        async with errors_as_status(context):
            status = self._inference.models.find(request.name, request.version)
            return pb.ModelReadyResponse(ready=status.state == "ready")

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Return the name, version and extensions of the server."""
        version = importlib.metadata.version("carryall")
        return pb.ServerMetadataResponse(name="carryall", version=version, extensions=EXTENSIONS)

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """Return the inputs and outputs of a model."""
        async with errors_as_status(context):
            facts = self._inference.facts(request.name, request.version)
            return pb.ModelMetadataResponse(
                name=facts.name,
                versions=[facts.version],
                platform=facts.platform,
                inputs=[_metadata(one) for one in facts.inputs],
                outputs=[_metadata(one) for one in facts.outputs],
            )

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        """Return the settings of a model, under Triton's names."""
        async with errors_as_status(context):
            return pb.ModelConfigResponse(
                config=_config(self._inference.facts(request.name, request.version))
            )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        """Run a model once."""
        async with errors_as_status(context):
            wanted = inference_request(request, self._memory)
            places = OutputPlaces(request, self._memory)
            return inference_response(await self._inference.run(wanted), places)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Run the requests of a stream concurrently; each response has the id of its request."""
        async with errors_as_status(context):
            writing = asyncio.Lock()
            room = asyncio.Semaphore(_MOST_OF_A_STREAM)
            try:
                async with asyncio.TaskGroup() as tasks:
                    async for request in requests:
                        await room.acquire()
                        task = tasks.create_task(self._answer(request, context, writing))
                        task.add_done_callback(lambda _: room.release())
            except ExceptionGroup as group:
                known = [error for error in group.exceptions if isinstance(error, CarryallError)]
                if len(known) < len(group.exceptions):
                    raise
                raise known[0] from None  # such as a message of the stream that is no request

    async def _answer(self, request: pb.ModelInferRequest, context: Context, writing: asyncio.Lock) -> None:
        """Write all responses to one request of a stream, or an error response."""
        try:
            caller = CALLER.get()
            if caller is not None:
                caller.budgets.count_request()
            places = OutputPlaces(request, self._memory)
            async with aclosing(
                self._inference.responses(inference_request(request, self._memory))
            ) as responses:
                async for response in responses:
                    if not (response.outputs or response.final):
                        continue
                    message = inference_response(response, places)
                    message.parameters["triton_final_response"].bool_param = response.final
                    await _write(context, writing, pb.ModelStreamInferResponse(infer_response=message))
        except CarryallError as error:
            failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
            failed.parameters["triton_final_response"].bool_param = True
            message_of = pb.ModelStreamInferResponse(error_message=str(error), infer_response=failed)
            await _write(context, writing, message_of)

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        """Return counters and durations of one model or of all models."""
        async with errors_as_status(context):
            inference = self._inference
            statuses = (
                [inference.models.find(request.name, request.version)]
                if request.name
                else inference.models.models()
            )
            return pb.ModelStatisticsResponse(model_stats=[self._statistics(status) for status in statuses])

    def _statistics(self, status: ModelStatus) -> pb.ModelStatistics:
        counts = self._inference.statistics.of(status.name, status.version)
        return pb.ModelStatistics(
            name=status.name,
            version=status.version,
            last_inference=counts.last_milliseconds,
            inference_count=counts.rows,
            execution_count=counts.runs,
            inference_stats=pb.InferStatistics(**_durations(counts)),
            batch_stats=[
                pb.InferBatchStatistics(batch_size=size, **_durations(batch))
                for size, batch in sorted(counts.batches.items())
            ],
        )

    async def RepositoryIndex(  # noqa: N802
        self, request: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        """Return all models, or only those that are ready."""
        async with errors_as_status(context):
            _only_repository(request.repository_name)
            statuses = self._inference.models.models()
            return pb.RepositoryIndexResponse(
                models=[
                    pb.RepositoryIndexResponse.ModelIndex(
                        name=one.name, version=one.version, state=_STATES[one.state], reason=one.reason
                    )
                    for one in statuses
                    if one.state == "ready" or not request.ready
                ]
            )

    async def RepositoryModelLoad(  # noqa: N802
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model of the repository."""
        async with errors_as_status(context):
            _only_repository(request.repository_name)
            if request.parameters:
                raise UnsupportedTaskError(
                    f"load parameters are not supported: {', '.join(request.parameters)}"
                )
            await self._inference.models.load(request.model_name)
            return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model."""
        async with errors_as_status(context):
            _only_repository(request.repository_name)
            others = request.parameters.keys() - {"unload_dependents"}  # no model depends on another
            if others:
                raise UnsupportedTaskError(
                    f"unload parameters are not supported: {', '.join(sorted(others))}"
                )
            await self._inference.models.unload(request.model_name)
            return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(  # noqa: N802
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Return the registered shared memory regions."""
        async with errors_as_status(context):
            answer = pb.SystemSharedMemoryStatusResponse()
            for region in self._memory.regions(request.name):
                answer.regions[region.name].name = region.name
                answer.regions[region.name].key = region.key
                answer.regions[region.name].offset = region.offset
                answer.regions[region.name].byte_size = region.byte_size
            return answer

    async def SystemSharedMemoryRegister(  # noqa: N802
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a shared memory region."""
        async with errors_as_status(context):
            self._memory.register(request.name, request.key, request.offset, request.byte_size)
            return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(  # noqa: N802
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister a shared memory region, or all regions if the name is empty."""
        async with errors_as_status(context):
            self._memory.unregister(request.name)
            return pb.SystemSharedMemoryUnregisterResponse()


async def _write(context: Context, writing: asyncio.Lock, message: Any) -> None:
    async with writing:  # gRPC allows one write at a time
        await context.write(message)


def _durations(counts: ModelCounts | BatchCounts) -> dict[str, pb.StatisticDuration]:
    return {
        part: pb.StatisticDuration(count=one.count, ns=one.nanoseconds) for part, one in counts.durations()
    }


def _only_repository(name: str) -> None:
    if name:
        raise RequestError(f"there is no repository '{name}'; leave the name empty")


def _metadata(facts: TensorFacts) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=facts.name, datatype=facts.datatype, shape=facts.shape
    )


def _config(facts: ModelFacts) -> pb.ModelConfig:
    def data_type(datatype: str) -> str:
        name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        return name if name in pb.DataType.keys() else "TYPE_INVALID"  # noqa: SIM118 -- it is not a mapping

    return pb.ModelConfig(
        name=facts.name,
        platform=facts.platform,
        backend=facts.platform,
        input=[
            pb.ModelInput(
                name=tensor.name,
                data_type=data_type(tensor.datatype),
                dims=tensor.shape,
                optional=tensor.optional,
            )
            for tensor in facts.inputs
        ],
        output=[
            pb.ModelOutput(name=tensor.name, data_type=data_type(tensor.datatype), dims=tensor.shape)
            for tensor in facts.outputs
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=facts.decoupled),
    )
