"""Unary calls: the request, and the function that reads the response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from ..errors import RequestError
from ..proto import models_pb2, tasks_pb2
from ..records import dataclass
from .options import ClassifyOptions, TextOptions
from .requests import EmbedPrompt, Message, Prompt, conversation, embed_input

T = TypeVar("T")

Pooling = Literal["last", "mean"]
_POOLINGS: dict[str | None, tasks_pb2.Pooling] = {
    None: tasks_pb2.POOLING_UNSPECIFIED,
    "last": tasks_pb2.POOLING_LAST,
    "mean": tasks_pb2.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A method's name, its request, and a function that converts its response."""

    method: str
    request: Any
    read: Callable[[Any], T]


def embed(
    model: str,
    inputs: Sequence[EmbedPrompt],
    pooling: str | None,
    normalize: bool,
    dimensions: int,
    late_chunking: bool,
    options: TextOptions,
) -> Call[list[list[float]]]:
    """Return the call that computes one vector for each input."""
    if pooling not in _POOLINGS:
        raise RequestError(f"pooling must be 'last' or 'mean', not {pooling!r}")
    request = tasks_pb2.EmbedRequest(
        model=model,
        inputs=[embed_input(one) for one in inputs],
        pooling=_POOLINGS[pooling],
        normalize=normalize,
        dimensions=dimensions,
        late_chunking=late_chunking,
        **options,
    )
    return Call("Embed", request, lambda answer: [list(vector.values) for vector in answer.embeddings])


def embed_kind(
    model: str, inputs: Sequence[Prompt], kind: tasks_pb2.VectorKind, options: TextOptions
) -> tasks_pb2.EmbedRequest:
    """Return the request for vectors of one kind."""
    return tasks_pb2.EmbedRequest(
        model=model, inputs=[embed_input(one) for one in inputs], kinds=[kind], **options
    )


def embed_sparse(
    model: str, inputs: Sequence[Prompt], options: TextOptions
) -> Call[list[tasks_pb2.SparseEmbedding]]:
    """Return the call that computes one sparse vector for each input."""
    request = embed_kind(model, inputs, tasks_pb2.VECTOR_KIND_SPARSE, options)
    return Call("Embed", request, lambda answer: list(answer.sparse_embeddings))


def embed_tokens(model: str, inputs: Sequence[Prompt], options: TextOptions) -> Call[list[list[list[float]]]]:
    """Return the call that computes a vector of each token of each input."""
    request = embed_kind(model, inputs, tasks_pb2.VECTOR_KIND_MULTI, options)

    def read(answer: tasks_pb2.EmbedResponse) -> list[list[list[float]]]:
        return [[list(token.values) for token in rows.tokens] for rows in answer.multi_embeddings]

    return Call("Embed", request, read)


def classify(
    model: str, texts: Iterable[str | tuple[str, str]], options: ClassifyOptions
) -> Call[list[tasks_pb2.Classification]]:
    """Return the call that classifies texts, or pairs of texts."""
    inputs = [
        tasks_pb2.ClassifyInput(text=text)
        if isinstance(text, str)
        else tasks_pb2.ClassifyInput(text=text[0], text_pair=text[1])
        for text in texts
    ]
    request = tasks_pb2.ClassifyRequest(model=model, inputs=inputs, **options)
    return Call("Classify", request, lambda answer: list(answer.results))


def score(model: str, pairs: Iterable[tuple[str, str]]) -> Call[list[tasks_pb2.ContinuationScore]]:
    """Return the call that computes the log-probability of each continuation."""
    inputs = [tasks_pb2.ScoreInput(text=text, continuation=end) for text, end in pairs]
    request = tasks_pb2.ScoreRequest(model=model, inputs=inputs)
    return Call("Score", request, lambda answer: list(answer.scores))


def rerank(
    model: str,
    query: str,
    documents: Sequence[str],
    top_n: int,
    instruction: str,
    truncate: bool | None,
    raw_scores: bool,
) -> Call[list[tasks_pb2.RankedDocument]]:
    """Return the call that ranks documents."""
    request = tasks_pb2.RerankRequest(
        model=model,
        query=query,
        documents=documents,
        top_n=top_n,
        instruction=instruction,
        raw_scores=raw_scores,
    )
    if truncate is not None:
        request.truncate = truncate
    return Call("Rerank", request, lambda answer: list(answer.documents))


def tokenize(
    model: str, text: str | Iterable[Message], tools: Iterable[Mapping[str, Any]], add_special_tokens: bool
) -> Call[list[int]]:
    """Return the call that tokenizes a text or a conversation."""
    request = tasks_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.conversation.CopyFrom(conversation(text, tools))
    return Call("Tokenize", request, lambda answer: list(answer.token_ids))


def detokenize(model: str, token_ids: Sequence[int], skip_special_tokens: bool) -> Call[str]:
    """Return the call that detokenizes token ids."""
    request = tasks_pb2.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )
    return Call("Detokenize", request, lambda answer: str(answer.text))


def models() -> Call[list[models_pb2.Model]]:
    """Return the call that lists all models."""
    return Call("ListModels", models_pb2.ListModelsRequest(), lambda answer: list(answer.models))


def load(model: str) -> Call[models_pb2.Model]:
    """Return the call that loads a model."""
    return Call("LoadModel", models_pb2.LoadModelRequest(model=model), lambda answer: answer.model)


def unload(model: str) -> Call[None]:
    """Return the call that unloads a model."""
    return Call("UnloadModel", models_pb2.UnloadModelRequest(model=model), lambda answer: None)


def stats(model: str) -> Call[list[models_pb2.EngineStats]]:
    """Return the call that reads counters and gauges."""
    return Call("GetStats", models_pb2.GetStatsRequest(model=model), lambda answer: list(answer.models))
