"""The endpoints ``/tokenize``, ``/detokenize``, ``/score`` and ``/rerank``, in vLLM's JSON format.

``/rerank`` follows the API of Jina and Cohere. A score is the probability that a document answers the query.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError
from ...api.scoring import RERANK_INSTRUCTION
from ..core.messages import Conversation, Prompt
from .openai.chat import read_turn
from .openai.reading import bool_field, is_token_ids, objects_field, text_field
from .service import HttpService, json_response, service_of
from .sse import while_connected

Json = dict[str, Any]

_TOKENIZE = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "tools",
        "add_special_tokens",
        "return_token_strs",
        "chat_template_kwargs",
    }
)
_SCORE = frozenset(
    {"model", "text_1", "text_2", "queries", "documents", "text", "continuations", "instruction"}
)
_RERANK = frozenset({"model", "query", "documents", "top_n", "return_documents", "instruction", "user"})
MOST_TEXTS = 2048


async def tokenize(request: Request) -> Response:
    """Handle ``POST /tokenize``: return the tokens of ``prompt``, or of ``messages`` in the chat template."""
    service = service_of(request)
    body, headers = await service.known_body(request, _TOKENIZE)
    handler = service.llm(request, body.get("model"))
    special = bool_field("add_special_tokens", body.get("add_special_tokens", True))
    tokens = await handler.tokenize(_prompt(body), add_special_tokens=special)
    info = handler.model.info
    answer: Json = {"count": len(tokens), "max_model_len": info.context_length, "tokens": tokens}
    if bool_field("return_token_strs", body.get("return_token_strs") or False):
        answer["token_strs"] = [await handler.detokenize([token]) for token in tokens]
    return json_response(answer, headers)


def _prompt(body: Mapping[str, Any]) -> Prompt:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str) and messages is None:
        return prompt
    if not isinstance(messages, list) or prompt is not None:
        raise RequestError("give either 'prompt' (a string) or 'messages' (a list)")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise RequestError(f"'chat_template_kwargs' must be an object, not {variables!r}")
    tools = objects_field("tools", body.get("tools") or [])
    return Conversation([read_turn(message) for message in messages], tools, variables)


async def detokenize(request: Request) -> Response:
    """Handle ``POST /detokenize``: return the text of ``tokens``."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "tokens"})
    tokens = body.get("tokens")
    if not is_token_ids(tokens):
        raise RequestError("'tokens' must be a list of token ids")
    text = await service.llm(request, body.get("model")).detokenize(tokens or [])
    return json_response({"prompt": text}, headers)


async def score(request: Request) -> Response:
    """Handle ``POST /score``: return the score of each pair of texts.

    With ``text`` and ``continuations``, return the log-probability of each continuation after the text.
    With vLLM's ``text_1`` and ``text_2`` (or ``queries`` and ``documents``), return the probability that
    each document answers its query.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, _SCORE)
    if "continuations" in body:
        handler = service.llm(request, body.get("model"))
        text, continuations = body.get("text"), body["continuations"]
        work = handler.score(_required_text("text", text), _texts("continuations", continuations))
        scores = await while_connected(request.receive, work)
        data: list[Json] = [
            {
                "index": index,
                "object": "score",
                "score": found.logprob,
                "greedy": found.greedy,
                "token_logprobs": found.token_logprobs,
            }
            for index, found in enumerate(scores)
        ]
        name = handler.name
    else:
        ranker = service.embedder(body.get("model"))
        queries = _texts("text_1", body.get("text_1", body.get("queries")))
        documents = _texts("text_2", body.get("text_2", body.get("documents")))
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"{len(queries)} queries for {len(documents)} documents; give 1 query or 1 per document"
            )
        instruction = _required_text("instruction", body.get("instruction", RERANK_INSTRUCTION))
        data = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            work_ = ranker.rerank(query, [document], instruction=instruction)
            (value,) = await while_connected(request.receive, work_)
            data.append({"index": index, "object": "score", "score": value})
        name = ranker.name
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "model": name, "data": data}
    return json_response(answer, headers)


async def rerank(request: Request) -> Response:
    """Handle ``POST /rerank``: sort ``documents`` by the probability that each answers ``query``."""
    service = service_of(request)
    body, headers = await service.known_body(request, _RERANK)
    handler = service.embedder(body.get("model"))
    documents = _texts("documents", body.get("documents"))
    most = body.get("top_n")
    if most is not None and (type(most) is not int or most < 1):
        raise RequestError(f"'top_n' must be an integer of at least 1, not {most!r}")
    show = bool_field("return_documents", body.get("return_documents", True))
    work = handler.rerank(
        _required_text("query", body.get("query")),
        documents,
        instruction=_required_text("instruction", body.get("instruction", RERANK_INSTRUCTION)),
    )
    scores = await while_connected(request.receive, work)
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[:most]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if show else {})
        for index in order
    ]
    name = handler.name
    return json_response({"id": f"rerank-{uuid.uuid4().hex}", "model": name, "results": results}, headers)


def _required_text(name: str, value: Any) -> str:
    if text_field(name, value) is None:
        raise RequestError(f"'{name}' is required and must be a string")
    return str(value)


def _texts(name: str, value: Any) -> list[str]:
    """Return one or several texts as a list. Cohere's documents may be objects with a field ``text``."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise RequestError(f"'{name}' must be a string or a list of strings")
    if len(given) > MOST_TEXTS:
        raise RequestError(f"'{name}' has {len(given)} texts; the maximum is {MOST_TEXTS}")
    read = [one.get("text") if isinstance(one, dict) else one for one in given]
    texts = [text for text in read if isinstance(text, str)]
    if len(texts) < len(given):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    return texts


def routes(service: HttpService) -> list[Route]:
    """Return the routes, with and without the version prefix."""
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        *[Route(f"{version}/score", score, methods=["POST"]) for version in ("", "/v1")],
        *[Route(f"{version}/rerank", rerank, methods=["POST"]) for version in ("", "/v1", "/v2")],
    ]
