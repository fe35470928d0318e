"""The API of Hugging Face's text-embeddings-inference: vectors, similarities, ranks and classes of texts.

``/predict`` also answers for classifiers of tokens and for labels that a request brings, in the JSON of
Hugging Face's inference API. See https://huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError, UnsupportedTaskError
from ....options import shown
from ...api.vectors import probabilities
from ..core.encoder import MOST_WAITING, EncoderHandler
from ..core.handler import LLMHandler
from .openai.embeddings import EmbeddingsAsk, asked_vectors, encoded, read_inputs, read_picture_input
from .openai.reading import bool_field, is_token_ids, text_field
from .service import HttpService, json_response, service_of
from .sse import while_connected

Json = dict[str, Any]

_COMMON = {"inputs", "model", "truncate", "truncation_direction", "prompt_name"}
_EMBED = _COMMON | {"normalize", "dimensions", "encoding_format"}
_SIMILARITY = {"inputs", "model", "parameters"}
_PREDICT = {"inputs", "model", "truncate", "truncation_direction", "raw_scores", "parameters"}
_PARAMETERS = {
    *("candidate_labels", "hypothesis_template", "multi_label", "aggregation_strategy", "ignore_labels"),
    *("stride", "top_k", "function_to_apply"),
}
RERANK = {"query", "texts", "model", "truncate", "truncation_direction", "raw_scores", "return_text"}
TOKENIZE = {"inputs", "model", "add_special_tokens", "prompt_name"}
_MOST_TEXTS = 2048


async def embed(request: Request) -> Response:
    """Handle ``POST /embed``: return a vector for each text."""
    service = service_of(request)
    return await _embed(request, service, await service.body(request))


async def _embed(request: Request, service: HttpService, given: Json) -> Response:
    body, headers = service.split(given, _EMBED)
    handler = await _embedder(service, body)
    normalize = _flag(body, "normalize", default=True)
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise RequestError(f"'dimensions' must be an integer of at least 1, not {shown(dimensions)}")
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise RequestError(f"'encoding_format' must be float or base64, not {shown(form)}")
    ask = EmbeddingsAsk(
        read_inputs("inputs", body.get("inputs")), cast(Any, form), dimensions, None, normalize
    )
    work = handler.embed(ask.inputs, normalize=normalize, **_options(body))
    vectors = asked_vectors(ask, await while_connected(request.receive, work))
    return json_response([encoded(vector, ask.encoding) for vector in vectors], headers)


async def embed_all(request: Request) -> Response:
    """Handle ``POST /embed_all``: return a vector for each token of each text."""
    service = service_of(request)
    body, headers = await service.known_body(request, _COMMON)
    texts, options = _texts(body), _options(body)
    work = (await service.encoder(body.get("model"))).embed_tokens(texts, **options)
    rows = await while_connected(request.receive, work)
    return json_response([row.tolist() for row in rows], headers)


async def embed_sparse(request: Request) -> Response:
    """Handle ``POST /embed_sparse``: return the elements of each text's sparse vector that are not 0."""
    service = service_of(request)
    body, headers = await service.known_body(request, _COMMON)
    texts, options = _texts(body), _options(body)
    work = (await service.encoder(body.get("model"))).embed_sparse(texts, **options)
    vectors = await while_connected(request.receive, work)
    answer = [
        [
            {"index": index, "value": value}
            for index, value in zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        ]
        for vector in vectors
    ]
    return json_response(answer, headers)


async def similarity(request: Request) -> Response:
    """Handle ``POST /similarity``: return the similarity of each sentence to the source."""
    service = service_of(request)
    return await _similarity(request, service, await service.body(request))


async def _similarity(request: Request, service: HttpService, given: Json) -> Response:
    body, headers = service.split(given, _SIMILARITY)
    inputs, parameters = _object(body, "inputs"), _object(body, "parameters")
    source = text_field("source_sentence", inputs.get("source_sentence"))
    if source is None:
        raise RequestError("'source_sentence' is required and must be a string")
    sentences = _strings("sentences", inputs.get("sentences"))
    work = (await service.encoder(body.get("model"))).similarity(source, sentences, **_options(parameters))
    return json_response(await while_connected(request.receive, work), headers)


async def predict(request: Request) -> Response:
    """Handle ``POST /predict``: return the labels of texts by their scores, the best first.

    A classifier of tokens returns the parts that it finds. With ``candidate_labels`` in ``parameters``, a
    model for natural language inference scores these labels, and one of texts and pictures those of pictures.
    """
    service = service_of(request)
    return await _predict(request, service, await service.body(request))


async def _predict(request: Request, service: HttpService, given: Json) -> Response:
    asked = _object(given, "parameters")
    unknown = {f"parameters.{name}": value for name, value in asked.items() if name not in _PARAMETERS}
    body, headers = service.split({**given, **unknown}, _PREDICT)
    parameters = {name: value for name, value in asked.items() if name in _PARAMETERS}
    truncate = _options(body)["truncate"]
    if body.get("inputs") is None:
        raise RequestError("'inputs' is required")
    handler = await service.encoder(body.get("model"))
    if parameters.get("candidate_labels") is not None:
        work = _zero_shot(handler, body, parameters, truncate)
    elif handler.finds_entities:
        work = _found(handler, body, parameters, truncate)
    else:
        work = _classes(handler, body, parameters, truncate)
    return json_response(await while_connected(request.receive, work), headers)


async def rank(request: Request, service: HttpService, given: Mapping[str, Any]) -> Response:
    """Answer ``POST /rerank`` with ``texts``: return their scores, the best first."""
    body, headers = service.split(dict(given), RERANK)
    query = text_field("query", body.get("query"))
    if query is None:
        raise RequestError("'query' is required and must be a string")
    texts, show = _strings("texts", body.get("texts")), _flag(body, "return_text")
    handler, raw = await service.embedder(body.get("model")), _flag(body, "raw_scores")
    work = handler.rerank(query, texts, truncate=_options(body)["truncate"], raw=raw)
    scores = await while_connected(request.receive, work)
    answer = [
        {"index": index, "score": scores[index]} | ({"text": texts[index]} if show else {})
        for index in sorted(range(len(texts)), key=lambda index: -scores[index])
    ]
    return json_response(answer, headers)


async def tokenize(request: Request, service: HttpService, given: Mapping[str, Any]) -> Response:
    """Answer ``POST /tokenize`` with ``inputs``: return the tokens of texts and their characters."""
    body, headers = service.split(dict(given), TOKENIZE)
    texts, prompt = _texts(body), text_field("prompt_name", body.get("prompt_name"))
    special = _flag(body, "add_special_tokens", default=True)
    handler = await service.encoder(body.get("model"))
    token_lists = await handler.tokenize(texts, add_special_tokens=special, prompt=prompt)
    words = handler.prompt_text(prompt)
    answer = [
        [
            _token(handler, words + text, *token)
            for token in zip(tokens.ids, tokens.special, tokens.spans, strict=True)
        ]
        for text, tokens in zip(texts, token_lists, strict=True)
    ]
    return json_response(answer, headers)


def _token(handler: EncoderHandler, text: str, token: int, special: int, span: tuple[int, int]) -> Json:
    """Return a token of a text; a special one has no place in it."""
    if special:
        return {"id": token, "text": handler.token_text(token), "special": True, "start": None, "stop": None}
    start, stop = span
    return {"id": token, "text": text[start:stop], "special": False, "start": start, "stop": stop}


async def decode(request: Request) -> Response:
    """Handle ``POST /decode``: return the text of each list of token ids."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"ids", "skip_special_tokens", "model"})
    ids = body.get("ids")
    lists = [ids] if is_token_ids(ids) else ids
    if not isinstance(lists, list) or not lists or not all(is_token_ids(each) for each in lists):
        raise RequestError("'ids' must be a list of token ids, or a list of such lists")
    skip = _flag(body, "skip_special_tokens", default=True)
    handler = await service.encoder(body.get("model"))
    texts = [await handler.detokenize(each, skip_special_tokens=skip) for each in lists]
    return json_response(texts, headers)


async def root(request: Request, service: HttpService, body: Json) -> Response:
    """Answer ``POST /`` of an encoder: compare sentences, rank ``texts``, predict or embed."""
    if isinstance(body.get("inputs"), dict):
        return await _similarity(request, service, body)
    if "query" in body:
        return await rank(request, service, body)
    handler = await service.encoder(body.get("model"))
    return await (_embed if handler.kinds else _predict)(request, service, body)


def info(handler: EncoderHandler) -> Json:
    """Return the answer to ``GET /info`` for an encoder."""
    from ...api.text_session import MOST_TOKENS

    if handler.kinds:
        pooling = handler.poolings or (("splade",) if handler.kinds == {"sparse"} else ())
        kind: Json = {"embedding": {"pooling": "+".join(pooling)}}
    else:
        labels = {str(place): label for place, label in enumerate(handler.labels)}
        places = {label: place for place, label in enumerate(handler.labels)}
        name = "reranker" if len(labels) == 1 else "classifier"
        kind = {name: {"id2label": labels, "label2id": places}}
    return {
        "model_id": handler.name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": kind,
        "max_concurrent_requests": MOST_WAITING,
        "max_input_length": handler.max_tokens,
        "max_batch_tokens": MOST_TOKENS,
        "max_batch_requests": None,
        "max_client_batch_size": _MOST_TEXTS,
        "auto_truncate": handler.truncates,
        "tokenization_workers": 1,
        "version": importlib.metadata.version("carryall"),
    }


async def _classes(handler: EncoderHandler, body: Json, parameters: Json, truncate: bool | None) -> Any:
    texts, single = _predicted(body.get("inputs"))
    way, top = parameters.get("function_to_apply"), parameters.get("top_k")
    if way not in (None, "sigmoid", "softmax", "none"):
        raise RequestError(f"'function_to_apply' must be sigmoid, softmax or none, not {shown(way)}")
    if top is not None and (type(top) is not int or top < 1):
        raise RequestError(f"'top_k' must be an integer of at least 1, not {shown(top)}")
    scores = await handler.classify(
        texts, truncate=truncate, raw=way is not None or _flag(body, "raw_scores")
    )
    if way in ("sigmoid", "softmax"):
        scores = probabilities(scores, independent=way == "sigmoid")
    answer = [_ranked(handler.labels, row)[:top] for row in scores]
    # The inference API, whose requests have parameters, answers a single text with a list too.
    return answer[0] if single and "parameters" not in body else answer


def _ranked(labels: Sequence[str], scores: Any) -> list[Json]:
    """Return labels with their scores, the best first."""
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"label": labels[place], "score": float(scores[place])} for place in order]


async def _found(handler: EncoderHandler, body: Json, parameters: Json, truncate: bool | None) -> Any:
    way = parameters.get("aggregation_strategy") or "simple"
    ignored = parameters.get("ignore_labels")
    ignored = ["O"] if ignored is None else _strings("ignore_labels", ignored or None)
    if "O" not in ignored:
        raise RequestError("'ignore_labels' must have 'O': parts without a label are not returned")
    if parameters.get("stride"):
        raise RequestError("'stride' is not supported: long texts are cut by 'truncate', not split")
    entities = await handler.entities(_texts(body), aggregation=way, truncate=truncate)
    name = "entity" if way == "none" else "entity_group"
    answer = [
        [
            {name: part.label, "score": part.score, "word": part.text, "start": part.start, "end": part.end}
            for part in parts
            if part.label not in ignored
        ]
        for parts in entities
    ]
    return answer[0] if isinstance(body.get("inputs"), str) else answer


async def _zero_shot(handler: EncoderHandler, body: Json, parameters: Json, truncate: bool | None) -> Any:
    given, inputs = parameters["candidate_labels"], body.get("inputs")
    texts: list[Any] = _pictures(inputs) if handler.sees else _texts(body)
    labels = [label.strip() for label in given.split(",")] if isinstance(given, str) else given
    hypothesis = parameters.get("hypothesis_template")
    scores = await handler.zero_shot(
        texts,
        _strings("candidate_labels", labels),
        hypothesis=hypothesis,
        independent=_flag(parameters, "multi_label"),
        truncate=truncate,
    )
    answer = [_ranked(labels, row) for row in scores]
    return answer if isinstance(inputs, list) else answer[0]


def _pictures(inputs: Any) -> list[Any]:
    """Return one or several pictures as a list."""
    several = inputs if isinstance(inputs, list) and inputs else [inputs]
    if len(several) > _MOST_TEXTS:
        raise RequestError(f"'inputs' has {len(several)} pictures; the maximum is {_MOST_TEXTS}")
    return [read_picture_input(each) for each in several]


async def _embedder(service: HttpService, body: Json) -> LLMHandler | EncoderHandler:
    """Return the model that a body names; without a name the only encoder, or the default model."""
    try:
        return await service.encoder(body.get("model"))
    except UnsupportedTaskError:
        return await service.embedder(body.get("model"))


def _options(body: Mapping[str, Any]) -> Json:
    """Return the options ``prompt`` and ``truncate`` of a body."""
    side = body.get("truncation_direction")
    if side not in (None, "Right", "right"):
        raise RequestError(f"'truncation_direction' must be Right, not {shown(side)}")
    truncate = body.get("truncate")
    return {
        "prompt": text_field("prompt_name", body.get("prompt_name")),
        "truncate": None if truncate is None else bool_field("truncate", truncate),
    }


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    return bool_field(name, default if value is None else value)


def _object(body: Mapping[str, Any], name: str) -> Json:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object, not {shown(value)}")
    return value


def _texts(body: Mapping[str, Any]) -> list[str]:
    value = body.get("inputs")
    return _strings("inputs", [value] if isinstance(value, str) else value)


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    if len(value) > _MOST_TEXTS:
        raise RequestError(f"'{name}' has {len(value)} texts; the maximum is {_MOST_TEXTS}")
    return value


def _predicted(value: Any) -> tuple[list[str | tuple[str, str]], bool]:
    """Return texts and pairs of texts, and whether there is one that is not in a list of several.

    A list of two strings is a pair; several texts are lists of one or two strings each.
    """
    single = isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )
    items: Sequence[Any] = [[value] if isinstance(value, str) else value] if single else value
    if not isinstance(items, list) or not all(
        isinstance(item, list) and len(item) in (1, 2) and all(isinstance(part, str) for part in item)
        for item in items
    ):
        raise RequestError("'inputs' must be a text, a pair of texts, or a list of lists of one or two texts")
    if not items or len(items) > _MOST_TEXTS:
        raise RequestError(f"'inputs' has {len(items)} texts; there must be 1 to {_MOST_TEXTS}")
    return [item[0] if len(item) == 1 else (item[0], item[1]) for item in items], single


def routes(service: HttpService) -> list[Route]:
    """Return the routes; ``utility`` has ``/rerank`` and ``/tokenize``, and ``tgi`` ``/info`` and ``/``."""
    paths = {
        "/embed": embed,
        "/embed_all": embed_all,
        "/embed_sparse": embed_sparse,
        "/similarity": similarity,
        "/predict": predict,
        "/decode": decode,
    }
    return [Route(path, handle, methods=["POST"]) for path, handle in paths.items()]
