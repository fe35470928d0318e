"""The endpoints ``/tokenize``, ``/detokenize``, ``/score`` and ``/rerank``, in vLLM's JSON format."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError, UnsupportedTaskError
from ..core.encoder import EncoderHandler
from . import tei
from .openai import scoring
from .openai.reading import bool_field, is_token_ids, text_or_conversation
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
        "add_generation_prompt",
        "continue_final_message",
    }
)


async def tokenize(request: Request) -> Response:
    """Handle ``POST /tokenize``: return the tokens of ``prompt``, or of ``messages`` in the chat template.

    With ``inputs``, the answer is that of text-embeddings-inference.
    """
    service = service_of(request)
    given = await service.body(request)
    if "inputs" in given and "prompt" not in given and "messages" not in given:
        return await tei.tokenize(request, service, given)
    body, headers = service.split(given, _TOKENIZE)
    handler = await service.embedder(body.get("model"))
    special = bool_field("add_special_tokens", body.get("add_special_tokens", True))
    prompt = text_or_conversation(body, "prompt")
    if isinstance(handler, EncoderHandler):
        if not isinstance(prompt, str):
            raise UnsupportedTaskError(f"the model '{handler.name}' is an encoder; it has no chat template")
        (found,) = await handler.tokenize([prompt], add_special_tokens=special)
        tokens, most = found.ids, handler.max_tokens
    else:
        tokens = await handler.tokenize(prompt, add_special_tokens=special)
        most = handler.info.context_length
    answer: Json = {"count": len(tokens), "max_model_len": most, "tokens": tokens}
    if bool_field("return_token_strs", body.get("return_token_strs") or False):
        answer["token_strs"] = [
            await handler.detokenize([token], skip_special_tokens=False) for token in tokens
        ]
    return json_response(answer, headers)


async def detokenize(request: Request) -> Response:
    """Handle ``POST /detokenize``: return the text of ``tokens``."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "tokens"})
    tokens = body.get("tokens")
    if not is_token_ids(tokens):
        raise RequestError("'tokens' must be a list of token ids")
    handler = await service.embedder(body.get("model"))
    text = await handler.detokenize(tokens or [], skip_special_tokens=False)
    return json_response({"prompt": text}, headers)


async def score(request: Request) -> Response:
    """Handle ``POST /score``: return the score of each pair of texts.

    With ``text`` and ``continuations``, return the log-probability of each continuation after the text; with
    ``messages`` instead of ``text``, of each answer to the conversation.
    With vLLM's ``text_1`` and ``text_2`` (or ``queries`` and ``documents``), return the probability that
    each document answers its query.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, scoring.SCORE)
    ask, name = scoring.read_score(body), uuid.uuid4().hex
    if isinstance(ask, scoring.ContinuationsAsk):
        handler = await service.llm(request, body.get("model"))
        found = await while_connected(request.receive, handler.score(ask.text, ask.continuations))
        return json_response(scoring.continuations_response(found, handler.name, name), headers)
    ranker = await service.embedder(body.get("model"))
    scores = []
    for query, document in zip(ask.queries, ask.documents, strict=True):
        work = ranker.rerank(query, [document], instruction=ask.instruction)
        scores += await while_connected(request.receive, work)
    return json_response(scoring.pairs_response(scores, ranker.name, name), headers)


async def rerank(request: Request) -> Response:
    """Handle ``POST /rerank``: sort ``documents`` by the probability that each answers ``query``.

    With ``texts`` in place of ``documents``, the answer is that of text-embeddings-inference.
    """
    service = service_of(request)
    given = await service.body(request)
    if "texts" in given and "documents" not in given:
        return await tei.rank(request, service, given)
    body, headers = service.split(given, scoring.RERANK)
    handler = await service.embedder(body.get("model"))
    ask = scoring.read_rerank(body)
    work = handler.rerank(ask.query, ask.documents, instruction=ask.instruction, truncate=ask.truncate)
    scores = await while_connected(request.receive, work)
    return json_response(scoring.rerank_response(ask, scores, handler.name, uuid.uuid4().hex), headers)


def routes(service: HttpService) -> list[Route]:
    """Return the routes, with and without the version prefix."""
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        *[Route(f"{version}/score", score, methods=["POST"]) for version in ("", "/v1")],
        *[Route(f"{version}/rerank", rerank, methods=["POST"]) for version in ("", "/v1", "/v2")],
    ]
