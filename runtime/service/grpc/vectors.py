"""The methods ``Embed`` and ``Classify`` of ``carryall.v1.GenerationService``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....errors import RequestError, UnsupportedTaskError
from ....proto import generation_pb2, tasks_pb2
from ...api.embedding import Input, Pooling
from ...api.vectors import cut_vectors
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler

_POOLINGS: dict[int, Pooling | None] = {
    tasks_pb2.POOLING_UNSPECIFIED: None,
    tasks_pb2.POOLING_LAST: "last",
    tasks_pb2.POOLING_MEAN: "mean",
}
_KINDS: dict[int, str] = {
    tasks_pb2.VECTOR_KIND_UNSPECIFIED: "dense",
    tasks_pb2.VECTOR_KIND_DENSE: "dense",
    tasks_pb2.VECTOR_KIND_SPARSE: "sparse",
    tasks_pb2.VECTOR_KIND_MULTI: "multi",
}


def optional_flag(request: Any, name: str) -> bool | None:
    """Return an optional boolean field of a message; None if it is not set."""
    return bool(getattr(request, name)) if request.HasField(name) else None


async def embed(
    handler: LLMHandler | EncoderHandler, request: tasks_pb2.EmbedRequest
) -> tasks_pb2.EmbedResponse:
    """Return the vectors that a request asks for.

    Raises:
        RequestError: a field is invalid.
        UnsupportedTaskError: the model has no such vectors.
        CarryallError: see ``EncoderHandler.embed``.
    """
    if not request.inputs:
        raise RequestError("inputs is empty; give at least one text, list of token ids or picture")
    if request.pooling not in _POOLINGS:
        raise RequestError(f"pooling has no value {request.pooling}")
    if wrong := [kind for kind in request.kinds if kind not in _KINDS]:
        raise RequestError(f"kinds has no value {wrong[0]}")
    kinds = list(dict.fromkeys(_KINDS[kind] for kind in request.kinds)) or ["dense"]
    inputs = [_input(each) for each in request.inputs]
    prompt, truncate = request.prompt_name or None, optional_flag(request, "truncate")
    normalize = request.normalize if request.HasField("normalize") else True
    vectors: dict[str, Any] = {}
    if kinds == ["dense"]:
        embeddings = await handler.embed(
            inputs,
            pooling=_POOLINGS[request.pooling],
            normalize=normalize,
            prompt=prompt,
            truncate=truncate,
            late_chunking=request.late_chunking,
        )
        vectors["dense"], tokens = embeddings.vectors, embeddings.prompt_tokens
    elif not isinstance(handler, EncoderHandler):
        raise UnsupportedTaskError(
            f"the model '{handler.name}' is a language model; it has dense vectors only"
        )
    elif request.late_chunking or request.pooling:
        raise RequestError("late_chunking and pooling are for dense vectors alone")
    else:
        vectors, tokens = await handler.embed_kinds(inputs, kinds, prompt=prompt, truncate=truncate)
    dense = np.array(vectors.get("dense", []), np.float32)
    if request.dimensions and len(dense):
        dense = cut_vectors(dense, request.dimensions, normalize)
    return tasks_pb2.EmbedResponse(
        model=handler.name,
        embeddings=[tasks_pb2.Embedding(values=vector) for vector in dense.tolist()],
        usage=generation_pb2.Usage(prompt_tokens=tokens),
        sparse_embeddings=[
            tasks_pb2.SparseEmbedding(indices=vector.indices.tolist(), values=vector.values.tolist())
            for vector in vectors.get("sparse", ())
        ],
        multi_embeddings=[
            tasks_pb2.MultiEmbedding(tokens=[tasks_pb2.Embedding(values=row) for row in rows.tolist()])
            for rows in vectors.get("multi", ())
        ],
    )


async def classify(
    handler: LLMHandler | EncoderHandler, request: tasks_pb2.ClassifyRequest
) -> tasks_pb2.ClassifyResponse:
    """Return the classes that a request asks for.

    Raises:
        RequestError: a field is invalid.
        UnsupportedTaskError: the model classifies nothing.
        CarryallError: see ``EncoderHandler.classify``.
    """
    if not isinstance(handler, EncoderHandler):
        raise UnsupportedTaskError(f"the model '{handler.name}' is a language model, not a classifier")
    truncate = optional_flag(request, "truncate")
    texts = [
        (each.text, each.text_pair) if each.HasField("text_pair") else each.text for each in request.inputs
    ]
    if handler.finds_entities:
        results = await _parts(handler, _alone(texts), request.aggregation or "simple", truncate)
    elif request.candidate_labels:
        if request.raw_scores:
            raise RequestError("raw_scores is for the model's own labels, not for candidate_labels")
        labels = list(request.candidate_labels)
        scores = await handler.zero_shot(
            _alone(texts),
            labels,
            hypothesis=request.hypothesis or None,
            independent=request.multi_label,
            truncate=truncate,
        )
        results = [_labels(labels, row) for row in scores]
    else:
        scores = await handler.classify(texts, truncate=truncate, raw=request.raw_scores)
        results = [_labels(handler.labels, row) for row in scores]
    return tasks_pb2.ClassifyResponse(model=handler.name, results=results)


async def _parts(
    handler: EncoderHandler, texts: Sequence[str], aggregation: str, truncate: bool | None
) -> list[tasks_pb2.Classification]:
    entities = await handler.entities(texts, aggregation=aggregation, truncate=truncate)
    return [
        tasks_pb2.Classification(
            parts=[
                tasks_pb2.TextPart(
                    label=part.label, score=part.score, start=part.start, end=part.end, text=part.text
                )
                for part in parts
            ]
        )
        for parts in entities
    ]


def _labels(names: Sequence[str], scores: Any) -> tasks_pb2.Classification:
    """Return labels with their scores, the best first."""
    order = np.argsort(-scores, kind="stable").tolist()
    return tasks_pb2.Classification(
        labels=[tasks_pb2.LabelScore(label=names[place], score=float(scores[place])) for place in order]
    )


def _alone(texts: Sequence[str | tuple[str, str]]) -> list[str]:
    alone = [text for text in texts if isinstance(text, str)]
    if len(alone) < len(texts):
        raise RequestError("this model classifies texts, not pairs; omit text_pair")
    return alone


def _input(message: tasks_pb2.EmbedInput) -> Input:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "image":
            return {"image": message.image}
        case _:
            raise RequestError("an input is empty; set one of text, token_ids, image")
