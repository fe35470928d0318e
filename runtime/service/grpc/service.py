"""`carryall.v1.GenerationService`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from contextlib import aclosing

from ....errors import RequestError
from ....proto import generation_pb2, models_pb2, service_pb2_grpc, tasks_pb2
from ...api.scoring import RERANK_INSTRUCTION
from ..access.admission import Admission
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler
from ..core.model_entry import ModelKind, ModelState, ModelStatus
from .messages import ChatWriter, chat_request, conversation, generate_request, generate_response
from .statuses import Context, errors_as_status
from .vectors import classify, embed, optional_flag

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
            return await embed(await self._models.embedder(request.model), request)

    async def Classify(  # noqa: N802
        self, request: tasks_pb2.ClassifyRequest, context: Context
    ) -> tasks_pb2.ClassifyResponse:
        """Return the classes of each input."""
        async with errors_as_status(context):
            return await classify(await self._models.embedder(request.model), request)

    async def Score(self, request: tasks_pb2.ScoreRequest, context: Context) -> tasks_pb2.ScoreResponse:  # noqa: N802
        """Return the log-probability of each continuation."""
        async with errors_as_status(context):
            handler = await self._models.llm(request.model)
            continuation_scores = await handler.score(
                [one.text for one in request.inputs], [one.continuation for one in request.inputs]
            )
            scores = [
                tasks_pb2.ContinuationScore(
                    logprob=score.logprob,
                    token_ids=score.token_ids,
                    token_logprobs=score.token_logprobs,
                    greedy=score.greedy,
                )
                for score in continuation_scores
            ]
            return tasks_pb2.ScoreResponse(model=handler.name, scores=scores)

    async def Rerank(self, request: tasks_pb2.RerankRequest, context: Context) -> tasks_pb2.RerankResponse:  # noqa: N802
        """Return the documents and their scores, best first."""
        async with errors_as_status(context):
            handler = await self._models.embedder(request.model)
            instruction = request.instruction or RERANK_INSTRUCTION
            scores = await handler.rerank(
                request.query,
                list(request.documents),
                instruction=instruction,
                truncate=optional_flag(request, "truncate"),
                raw=request.raw_scores,
            )
            ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
            return tasks_pb2.RerankResponse(
                model=handler.name,
                documents=[tasks_pb2.RankedDocument(index=index, score=scores[index]) for index in ranked],
            )

    async def Tokenize(  # noqa: N802
        self, request: tasks_pb2.TokenizeRequest, context: Context
    ) -> tasks_pb2.TokenizeResponse:
        """Return the token ids of a text or a conversation."""
        async with errors_as_status(context):
            handler = await self._models.embedder(request.model)
            if isinstance(handler, EncoderHandler):
                return tasks_pb2.TokenizeResponse(
                    model=handler.name,
                    token_ids=await _tokens_of_text(handler, request),
                    context_length=handler.max_tokens or 0,
                )
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
            handler = await self._models.embedder(request.model)
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


async def _tokens(handler: LLMHandler, request: tasks_pb2.TokenizeRequest) -> Sequence[int]:
    match request.WhichOneof("input"):
        case "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await handler.tokenize(request.text, add_special_tokens=add)
        case "conversation":
            return await handler.tokenize(conversation(request.conversation))
        case _:
            raise RequestError("the request has no input; set one of text, conversation")


async def _tokens_of_text(handler: EncoderHandler, request: tasks_pb2.TokenizeRequest) -> Sequence[int]:
    if request.WhichOneof("input") != "text":
        raise RequestError(f"the model '{handler.name}' is an encoder; it tokenizes a 'text'")
    add = request.add_special_tokens if request.HasField("add_special_tokens") else True
    (tokens,) = await handler.tokenize([request.text], add_special_tokens=add)
    return tokens.ids


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
