"""Encoders and classifiers with tensor inputs and outputs: texts in, vectors and scores out.

The texts are the tensor ``text_input``, as for language models, and the pictures of models that see them the
files in ``image``. Options are parameters of the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ....errors import RequestError
from ....options import shown
from ...api.vectors import cut_vectors, scaled
from ..core.encoder import EncoderHandler
from .messages import InferenceRequest, TensorFacts
from .tensors import Array, byte_elements, of_bytes, type_of

_TEXTS, _PICTURES, _PAIR, _QUERY = "text_input", "image", "text_pair", "query"
_OF_KIND = {
    "dense": [TensorFacts("embedding", "FP32", [-1, -1])],
    "sparse": [
        TensorFacts("sparse_indices", "INT64", [-1]),
        TensorFacts("sparse_values", "FP32", [-1]),
        TensorFacts("sparse_lengths", "INT64", [-1]),
    ],
    "multi": [TensorFacts("token_embedding", "FP32", [-1, -1]), TensorFacts("token_lengths", "INT64", [-1])],
}
_SCORES = TensorFacts("scores", "FP32", [-1])
_OPTIONS = {"prompt_name", "truncate", "normalize", "dimensions", "raw_scores", "aggregation"}
# Parameters of the protocol, which are no options of a model.
_RESERVED = {"sequence_id", "sequence_start", "sequence_end", "headers", "binary_data_output", "priority"}


def facts_of(handler: EncoderHandler) -> tuple[list[TensorFacts], list[TensorFacts]]:
    """Return the inputs and outputs of a model."""
    texts = TensorFacts(_TEXTS, "BYTES", [-1])
    query = TensorFacts(_QUERY, "BYTES", [1], optional=True)
    if handler.kinds:
        outputs = [facts for kind in sorted(handler.kinds) for facts in _OF_KIND[kind]]
        if handler.sees:
            texts = TensorFacts(_TEXTS, "BYTES", [-1], optional=True)
            return [texts, TensorFacts(_PICTURES, "BYTES", [-1], optional=True), query], [*outputs, _SCORES]
        return [texts, query], [*outputs, _SCORES]
    if handler.finds_entities:
        return [texts], [TensorFacts("entities", "BYTES", [-1])]
    if len(handler.labels) == 1:
        return [texts, TensorFacts(_PAIR, "BYTES", [-1], optional=True), query], [_SCORES]
    labels = len(handler.labels)
    return [texts, TensorFacts(_PAIR, "BYTES", [-1], optional=True)], [
        TensorFacts("scores", "FP32", [-1, labels]),
        TensorFacts("labels", "BYTES", [labels]),
    ]


async def encode(handler: EncoderHandler, request: InferenceRequest) -> dict[str, Array]:
    """Return the outputs of a request: the scores of texts for a query, the vectors of texts, or classes.

    Of the kinds of vectors that a model has, those are computed whose outputs are requested; without any,
    all are, in one pass. Vectors of pictures follow those of texts.

    Raises:
        RequestError: an input or a parameter is missing, unknown or of the wrong type.
        CarryallError: see ``EncoderHandler``.
    """
    inputs, outputs = facts_of(handler)
    _check_inputs(request, [facts.name for facts in inputs])
    pictures = [_picture(file) for file in byte_elements(request.inputs.get(_PICTURES, of_bytes([])))]
    texts = _texts(request, _TEXTS) if _TEXTS in request.inputs else []
    options = _options(request)
    truncate: bool | None = options["truncate"]
    if _QUERY in request.inputs:
        queries = _texts(request, _QUERY)
        if len(queries) != 1:
            raise RequestError(f"input '{_QUERY}' must have one element, not {len(queries)}")
        ranks = await handler.rerank(queries[0], texts, truncate=truncate, raw=options["raw_scores"])
        return {"scores": np.array(ranks, np.float32)}
    if handler.finds_entities:
        return {"entities": await _entities(handler, texts, options)}
    if not handler.kinds:
        asked: Sequence[Any] = texts
        if _PAIR in request.inputs:
            asked = _pairs(texts, _texts(request, _PAIR))
        scores = await handler.classify(asked, truncate=truncate, raw=options["raw_scores"])
        if len(handler.labels) == 1:
            return {"scores": scores[:, 0]}
        return {"scores": scores, "labels": of_bytes(label.encode() for label in handler.labels)}
    unknown = [name for name in request.outputs if name not in {facts.name for facts in outputs}]
    if unknown or "scores" in request.outputs:
        why = (
            f"unknown output '{unknown[0]}'" if unknown else f"the output 'scores' needs the input '{_QUERY}'"
        )
        raise RequestError(f"{why}; the outputs are: {', '.join(facts.name for facts in outputs)}")
    wanted = [
        kind for kind in sorted(handler.kinds) if {f.name for f in _OF_KIND[kind]} & set(request.outputs)
    ]
    return await _vectors(handler, [*texts, *pictures], wanted or sorted(handler.kinds), options)


async def _vectors(
    handler: EncoderHandler, texts: Sequence[Any], kinds: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Array]:
    columns, _ = await handler.embed_kinds(
        texts, kinds, prompt=options["prompt_name"], truncate=options["truncate"]
    )
    outputs: dict[str, Array] = {}
    if "dense" in columns:
        vectors = np.array(columns["dense"], np.float32)
        if options["dimensions"] is not None:
            vectors = cut_vectors(vectors, options["dimensions"], normalize=False)
        outputs["embedding"] = scaled(vectors) if options["normalize"] else vectors
    if "sparse" in columns:
        outputs["sparse_indices"] = np.concatenate([vector.indices for vector in columns["sparse"]])
        outputs["sparse_values"] = np.concatenate([vector.values for vector in columns["sparse"]])
        outputs["sparse_lengths"] = np.array([len(vector.indices) for vector in columns["sparse"]], np.int64)
    if "multi" in columns:
        outputs["token_embedding"] = np.concatenate(columns["multi"])
        outputs["token_lengths"] = np.array([len(rows) for rows in columns["multi"]], np.int64)
    return outputs


async def _entities(handler: EncoderHandler, texts: Sequence[str], options: Mapping[str, Any]) -> Array:
    """Return the parts of each text, as the JSON of a list of objects."""
    entities = await handler.entities(
        texts, aggregation=options["aggregation"] or "simple", truncate=options["truncate"]
    )
    return of_bytes(json.dumps([asdict(part) for part in parts]).encode() for parts in entities)


def _check_inputs(request: InferenceRequest, known: Sequence[str]) -> None:
    for name, array in request.inputs.items():
        if name not in known:
            raise RequestError(f"unknown input '{name}'; the inputs are: {', '.join(known)}")
        if type_of(array).name != "BYTES":
            raise RequestError(f"input '{name}' must be BYTES, not {type_of(array).name}")
    needed = [_PICTURES] if _PICTURES in request.inputs and _QUERY not in request.inputs else [_TEXTS]
    for name in [*needed, *([_TEXTS] if _TEXTS in request.inputs else [])]:
        if not request.inputs.get(name, np.empty(0)).size:
            raise RequestError(f"the input '{name}' is missing or has no element")
    if _QUERY in request.inputs and _PICTURES in request.inputs:
        raise RequestError(f"'{_QUERY}' ranks texts; leave out '{_PICTURES}'")


def _texts(request: InferenceRequest, name: str) -> list[str]:
    try:
        return [element.decode() for element in byte_elements(request.inputs[name])]
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}' is not UTF-8: {error}") from error


def _picture(file: bytes) -> dict[str, str | bytes]:
    """Return a picture of its file, or of a ``data:`` address, which JSON holds."""
    return {"image": file.decode("latin-1") if file.startswith(b"data:") else file}


def _pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    if len(first) != len(second):
        raise RequestError(f"'{_TEXTS}' has {len(first)} elements, but '{_PAIR}' has {len(second)}")
    return list(zip(first, second, strict=True))


def _options(request: InferenceRequest) -> dict[str, Any]:
    """Return the options of a request by name.

    Raises:
        RequestError: a parameter is unknown or of the wrong type.
    """
    parameters = {
        name: value
        for name, value in request.parameters.items()
        if name not in _RESERVED and not name.startswith("triton_")
    }
    if unknown := sorted(parameters.keys() - _OPTIONS):
        raise RequestError(
            f"unknown parameter '{unknown[0]}'; the parameters are: {', '.join(sorted(_OPTIONS))}"
        )
    options: dict[str, Any] = {"normalize": True, "raw_scores": False, **parameters}
    for name, kind in (
        *((name, bool) for name in ("truncate", "normalize", "raw_scores")),
        *((name, str) for name in ("prompt_name", "aggregation")),
        ("dimensions", int),
    ):
        value = options.setdefault(name, None)
        if value is not None and type(value) is not kind:
            raise RequestError(f"parameter '{name}' must be a {kind.__name__}, not {shown(value)}")
    return options
