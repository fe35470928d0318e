"""Run models on the tensors of requests, and describe models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ....errors import RequestError
from ..access.admission import Admission
from ..access.policy import Policy
from ..core.config import ServerConfig
from ..core.model_entry import Entry
from ..core.repository import ModelRepository
from .messages import InferenceRequest, InferenceResponse, ModelFacts, TensorFacts
from .shared_memory import SharedMemory
from .statistics import Statistics
from .tensor_run import run_model
from .tensors import type_of_onnx
from .text import INPUTS, OUTPUTS, TextRequest
from .vectors import encode, facts_of

EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
    "system_shared_memory",
)
LLM_PLATFORM, ENCODER_PLATFORM, TENSOR_PLATFORM = "carryall_llm", "carryall_encoder", "onnxruntime_onnx"


class Inference:
    """Run and count the requests of all transports, in one event loop.

    Args:
        models: the models, with access control.
        memory: the shared memory of clients.
    """

    def __init__(self, models: Admission, memory: SharedMemory) -> None:
        self.models, self.memory = models, memory
        self.statistics = Statistics()

    @classmethod
    def of(cls, models: ModelRepository, config: ServerConfig) -> Inference:
        """Return an instance for the models of a repository and the service's settings."""
        policy = Policy(config)
        models.fetcher.config = lambda: policy.config
        return cls(Admission(models, policy), SharedMemory(allowed=config.shared_memory))

    async def run(self, request: InferenceRequest) -> InferenceResponse:
        """Return the response to a request that has exactly 1 response.

        Raises:
            RequestError: the request is invalid, or sets ``stream``.
            CarryallError: the model failed.
        """
        async with aclosing(self.responses(request)) as responses:
            found = [response async for response in responses]
        if len(found) != 1:
            raise RequestError("'stream' is possible in streaming calls only, such as ModelStreamInfer")
        return found[0]

    async def responses(self, request: InferenceRequest) -> AsyncGenerator[InferenceResponse, None]:
        """Run a request and yield its responses. Closing the generator cancels the request.

        The first response of a streamed text has no outputs: it tells that the request is queued.

        Raises:
            CarryallError: see ``run``.
        """
        entry, adapter = await self.models.version(request.model, request.version)
        start, times, ended = time.perf_counter_ns(), None, False
        try:
            if entry.loader.kind == "encoder":
                yield _response(request, entry, await encode(entry.text_encoder(), request))
            elif entry.loader.kind == "tensor":
                outputs, times = await run_model(entry.tensor_model(), request.inputs, request.outputs)
                yield _response(request, entry, outputs)
            else:
                async with aclosing(self._text(request, entry, adapter)) as responses:
                    async for response in responses:
                        yield response
            ended = True
        finally:
            counts, took = self.statistics.of(entry.name, entry.version), time.perf_counter_ns() - start
            if ended:
                counts.succeeded(took, rows(request, of_texts=entry.loader.kind == "encoder"), times)
            else:
                counts.fail.add(took)

    async def _text(
        self, request: InferenceRequest, entry: Entry, adapter: str | None
    ) -> AsyncGenerator[InferenceResponse, None]:
        wanted = TextRequest(request, entry.language_model().defaults, self.models.admitted)
        handler = entry.language_model(wanted.adapter or adapter)
        if not wanted.stream:
            yield _response(request, entry, await wanted.whole(handler))
            return
        async with aclosing(wanted.parts(handler)) as parts:
            async for outputs, final in parts:
                if outputs:
                    yield _response(request, entry, outputs, final=final)
                else:
                    yield InferenceResponse(
                        model=entry.name, version=entry.version, id=request.id, outputs={}, final=False
                    )

    def facts(self, name: str, version: str = "") -> ModelFacts:
        """Return the metadata of a model.

        Raises:
            UnknownModelError: no model has this name and version.
            ServiceUnavailableError: the model is not loaded.
        """
        status = self.models.find(name, version)
        entry = self.models.serving(status.name, version)
        if status.kind == "llm":
            entry.language_model().served  # noqa: B018 -- raises if it is not loaded
            platform, inputs, outputs = LLM_PLATFORM, INPUTS, OUTPUTS
        elif status.kind == "encoder":
            platform = ENCODER_PLATFORM
            inputs, outputs = facts_of(entry.text_encoder())
        else:
            session = entry.tensor_model().session
            platform = TENSOR_PLATFORM
            inputs, outputs = _tensor_facts(session.get_inputs()), _tensor_facts(session.get_outputs())
        return ModelFacts(
            name=status.name,
            version=status.version,
            platform=platform,
            inputs=inputs,
            outputs=outputs,
            decoupled=status.kind == "llm",
        )


def rows(request: InferenceRequest, *, of_texts: bool = False) -> int:
    """Return the largest first dimension of the inputs with at least 2 dimensions, or 1 if there are none.

    ``of_texts`` counts the elements of the largest input, each of which is a text.
    """
    if of_texts:
        return max(array.size for array in request.inputs.values())
    return max((array.shape[0] for array in request.inputs.values() if array.ndim > 1), default=1)


def _tensor_facts(values: Any) -> list[TensorFacts]:
    facts = []
    for value in values:
        kind = type_of_onnx(value.type)
        shape = [size if isinstance(size, int) else -1 for size in value.shape or []]
        facts.append(TensorFacts(value.name, kind.name if kind is not None else value.type, shape))
    return facts


def _response(
    request: InferenceRequest, entry: Entry, outputs: Mapping[str, Any], *, final: bool = True
) -> InferenceResponse:
    """Return a response with the requested outputs.

    Raises:
        RequestError: a requested output does not exist.
    """
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        raise RequestError(f"unknown output '{missing[0]}'; the outputs are: {', '.join(outputs)}")
    wanted = {name: outputs[name] for name in request.outputs or outputs}
    return InferenceResponse(
        model=entry.name, version=entry.version, id=request.id, outputs=wanted, final=final
    )
