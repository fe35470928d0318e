"""`carryall.v1.GenerationService`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from contextlib import aclosing

from ....errors import RequestError
from ....proto import generation_pb2, models_pb2, service_pb2_grpc, tasks_pb2
from ...api.embedding import Pooling
from ...api.scoring import RERANK_INSTRUCTION
from ..access.admission import Admission
from ..core.handler import LLMHandler
from ..core.model_entry import ModelKind, ModelState, ModelStatus
from .messages import ChatWriter, chat_request, conversation, generate_request, generate_response
from .statuses import Context, errors_as_status

POOLINGS: dict[int, Pooling | None] = {
    tasks_pb2.POOLING_UNSPECIFIED: None,
    tasks_pb2.POOLING_LAST: "last",
    tasks_pb2.POOLING_MEAN: "mean",
}
STATES: dict[ModelState, models_pb2.ModelState] = {
    "unloaded": models_pb2.MODEL_STATE_UNLOADED,
    "loading": models_pb2.MODEL_STATE_LOADING,
    "ready": models_pb2.MODEL_STATE_READY,
    "unloading": models_pb2.MODEL_STATE_UNLOADING,
    "failed": models_pb2.MODEL_STATE_FAILED,
}
KINDS: dict[ModelKind, models_pb2.ModelKind] = {
    "llm": models_pb2.MODEL_KIND_LANGUAGE,
    "tensor": models_pb2.MODEL_KIND_TENSOR,
    "encoder": models_pb2.MODEL_KIND_ENCODER,
}


class GenerationServicer(service_pb2_grpc.GenerationServiceServicer):
    """Implements the service's methods; the method names are those of the proto file."""

    def __init__(self, models: Admission) -> None:
        self._models = models

    # Responses are written to the context, not yielded. A cancelled call then raises here at once and cancels
    # its request; a generator would do so when it is garbage collected.
    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the continuation of a prompt."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            wanted = self._models.admitted(generate_request(request, handler.defaults))
            name, top = handler.name, wanted.params.logprobs or 0
            async with aclosing(handler.generate(wanted)) as deltas:
                async for delta in deltas:
                    if delta.opens:
                        await context.send_initial_metadata(())
                    else:
                        await context.write(generate_response(delta, name, top))

    async def Chat(self, request: generation_pb2.ChatRequest, context: Context) -> None:  # noqa: N802
        """Stream the next turn in a conversation."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            wanted = self._models.admitted(chat_request(request, handler.defaults))
            writer = ChatWriter(handler.name, wanted)
            async with aclosing(handler.generate(wanted)) as deltas:
                async for delta in deltas:
                    if delta.opens:
                        await context.send_initial_metadata(())
                    else:
                        await context.write(writer.response(delta))

    async def Embed(self, request: tasks_pb2.EmbedRequest, context: Context) -> tasks_pb2.EmbedResponse:  # noqa: N802
        """Return one vector for each input."""
        async with errors_as_status(context):
            handler = await self._models.embedder(request.model)
            if request.pooling not in POOLINGS:
                raise RequestError(f"pooling has no value {request.pooling}")
            found = await handler.embed(
                [_embed_input(one) for one in request.inputs],
                pooling=POOLINGS[request.pooling],
                normalize=request.normalize if request.HasField("normalize") else True,
            )
            return tasks_pb2.EmbedResponse(
                model=handler.name,
                embeddings=[tasks_pb2.Embedding(values=vector) for vector in found.vectors.tolist()],
                usage=generation_pb2.Usage(prompt_tokens=found.prompt_tokens),
            )

    async def Score(self, request: tasks_pb2.ScoreRequest, context: Context) -> tasks_pb2.ScoreResponse:  # noqa: N802
        """Return the log-probability of each continuation."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            found = await handler.score(
                [one.text for one in request.inputs], [one.continuation for one in request.inputs]
            )
            scores = [
                tasks_pb2.ContinuationScore(
                    logprob=score.logprob,
                    token_ids=score.token_ids,
                    token_logprobs=score.token_logprobs,
                    greedy=score.greedy,
                )
                for score in found
            ]
            return tasks_pb2.ScoreResponse(model=handler.name, scores=scores)

    async def Rerank(self, request: tasks_pb2.RerankRequest, context: Context) -> tasks_pb2.RerankResponse:  # noqa: N802
        """Return the documents and their scores, best first."""
        async with errors_as_status(context):
            handler = await self._models.embedder(request.model)
            instruction = request.instruction or RERANK_INSTRUCTION
            scores = await handler.rerank(request.query, list(request.documents), instruction=instruction)
            ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
            documents = [tasks_pb2.RankedDocument(index=index, score=scores[index]) for index in ranked]
            return tasks_pb2.RerankResponse(model=handler.name, documents=documents)

    async def Tokenize(  # noqa: N802
        self, request: tasks_pb2.TokenizeRequest, context: Context
    ) -> tasks_pb2.TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            token_ids = await _tokens(handler, request)
            info = handler.info
            return tasks_pb2.TokenizeResponse(
                model=info.model, token_ids=token_ids, context_length=info.context_length
            )

    async def Detokenize(  # noqa: N802
        self, request: tasks_pb2.DetokenizeRequest, context: Context
    ) -> tasks_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await handler.detokenize(list(request.token_ids), skip_special_tokens=skip)
            return tasks_pb2.DetokenizeResponse(model=handler.name, text=text)

    async def ListModels(  # noqa: N802
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        """Return all models."""
        async with errors_as_status(context):
            models = [_model(status) for status in sorted(self._models.models(), key=lambda one: one.name)]
            return models_pb2.ListModelsResponse(
                models=models, server_version=importlib.metadata.version("carryall")
            )

    async def LoadModel(  # noqa: N802
        self, request: models_pb2.LoadModelRequest, context: Context
    ) -> models_pb2.LoadModelResponse:
        """Load a model and wait until it is ready."""
        async with errors_as_status(context):
            return models_pb2.LoadModelResponse(model=_model(await self._models.load(request.model)))

    async def UnloadModel(  # noqa: N802
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        """Unload a model."""
        async with errors_as_status(context):
            await self._models.unload(request.model)
            return models_pb2.UnloadModelResponse()

    async def GetStats(  # noqa: N802
        self, request: models_pb2.GetStatsRequest, context: Context
    ) -> models_pb2.GetStatsResponse:
        """Return the engines' counters and gauges."""
        async with errors_as_status(context):
            statuses = [self._models.find(request.model)] if request.model else self._ready()
            return models_pb2.GetStatsResponse(models=[self._stats(status) for status in statuses])

    def _ready(self) -> list[ModelStatus]:
        statuses = [one for one in self._models.models() if one.state == "ready" and one.kind == "llm"]
        return sorted(statuses, key=lambda one: one.name)

    def _stats(self, status: ModelStatus) -> models_pb2.EngineStats:
        stats = self._models.serving(status.name, status.version).language_model().stats()
        name = status.name if status.only else f"{status.name}:{status.version}"
        return models_pb2.EngineStats(model=name, **dataclasses.asdict(stats))


def _embed_input(message: tasks_pb2.EmbedInput) -> str | list[int]:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise RequestError("an input is empty; set one of text, token_ids")


async def _tokens(handler: LLMHandler, request: tasks_pb2.TokenizeRequest) -> Sequence[int]:
    match request.WhichOneof("input"):
        case "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await handler.tokenize(request.text, add_special_tokens=add)
        case "conversation":
            return await handler.tokenize(conversation(request.conversation))
        case _:
            raise RequestError("the request has no input; set one of text, conversation")


def _model(status: ModelStatus) -> models_pb2.Model:
    message = models_pb2.Model(
        name=status.name,
        state=STATES[status.state],
        reason=status.reason,
        version=status.version,
        kind=KINDS[status.kind],
    )
    if status.info is not None:
        message.provider = status.info.provider
        message.vocab_size = status.info.vocab_size
        message.context_length = status.info.context_length
        message.max_slots = status.info.max_slots
    return message
