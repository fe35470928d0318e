"""``/v1/score`` and ``/v1/rerank``: read request bodies and write response bodies.

``/rerank`` follows the API of Jina and Cohere, ``/score`` that of vLLM. A score of a document is the
probability that it answers the query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .....errors import RequestError
from .....options import shown
from .....records import dataclass
from ....api.scoring import RERANK_INSTRUCTION, ContinuationScore
from ....types.outputs import Usage
from ...core.chat import Conversation
from .reading import Json, bool_field, text_field, text_or_conversation
from .writing import usage_json

SCORE = frozenset(
    {"model", "text_1", "text_2", "queries", "documents", "text", "continuations", "instruction", "user"}
    | {"messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
)
RERANK = frozenset(
    {"model", "query", "documents", "top_n", "return_documents", "instruction", "user", "truncate"}
)
MOST_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class ContinuationsAsk:
    """A text or a conversation, and the continuations whose log-probabilities are asked for."""

    text: str | Conversation
    continuations: list[str]


@dataclass(frozen=True, slots=True)
class PairsAsk:
    """Queries and their documents, one each, that are scored under an instruction."""

    queries: list[str]
    documents: list[str]
    instruction: str


@dataclass(frozen=True, slots=True)
class RerankAsk:
    """Documents that are ranked for a query.

    Args:
        query: the query.
        documents: the documents.
        instruction: what an answer is.
        top_n: how many of the best to return; None is all.
        show: whether to return their texts too.
        truncate: whether to cut texts that are too long; None does as the model is served.
    """

    query: str
    documents: list[str]
    instruction: str
    top_n: int | None
    show: bool
    truncate: bool | None = None


def read_score(body: Mapping[str, Any]) -> ContinuationsAsk | PairsAsk:
    """Return the content of a body of ``/score``.

    Raises:
        RequestError: a field is missing or invalid.
    """
    if body.get("continuations") is not None:
        continuations = _texts("continuations", body["continuations"])
        return ContinuationsAsk(text_or_conversation(body, "text"), continuations)
    queries = _texts("text_1", body.get("text_1", body.get("queries")))
    documents = _texts("text_2", body.get("text_2", body.get("documents")))
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{len(queries)} queries for {len(documents)} documents; give 1 query or 1 per document"
        )
    return PairsAsk(queries, documents, _instruction(body))


def read_rerank(body: Mapping[str, Any]) -> RerankAsk:
    """Return the content of a body of ``/rerank``.

    Raises:
        RequestError: a field is missing or invalid.
    """
    most = body.get("top_n")
    if most is not None and (type(most) is not int or most < 1):
        raise RequestError(f"'top_n' must be an integer of at least 1, not {shown(most)}")
    show, truncate = body.get("return_documents"), body.get("truncate")
    return RerankAsk(
        _required_text("query", body.get("query")),
        _texts("documents", body.get("documents")),
        _instruction(body),
        most,
        bool_field("return_documents", True if show is None else show),
        None if truncate is None else bool_field("truncate", truncate),
    )


def continuations_response(scores: Sequence[ContinuationScore], model: str, name: str) -> Json:
    """Return the response with the log-probabilities of continuations; ``name`` is that of the request."""
    data: list[Json] = [
        {
            "index": index,
            "object": "score",
            "score": score.logprob,
            "greedy": score.greedy,
            "token_logprobs": score.token_logprobs,
        }
        for index, score in enumerate(scores)
    ]
    usage = Usage(
        prompt_tokens=sum(score.prompt_tokens for score in scores),
        completion_tokens=0,
        cached_tokens=sum(score.cached_tokens for score in scores),
    )
    return {
        "id": f"score-{name}", "object": "list", "model": model, "data": data, "usage": usage_json(usage)
    }  # fmt: skip


def pairs_response(scores: Sequence[float], model: str, name: str) -> Json:
    """Return the response with the scores of documents; ``name`` is that of the request."""
    data: list[Json] = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return {"id": f"score-{name}", "object": "list", "model": model, "data": data}


def rerank_response(ask: RerankAsk, scores: Sequence[float], model: str, name: str) -> Json:
    """Return the response with the documents by score, the best first; ``name`` is that of the request."""
    order = sorted(range(len(ask.documents)), key=lambda index: -scores[index])[: ask.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": ask.documents[index]}} if ask.show else {})
        for index in order
    ]
    return {"id": f"rerank-{name}", "model": model, "results": results}


def _instruction(body: Mapping[str, Any]) -> str:
    instruction = body.get("instruction")
    return _required_text("instruction", RERANK_INSTRUCTION if instruction is None else instruction)


def _required_text(name: str, value: Any) -> str:
    if text_field(name, value) is None:
        raise RequestError(f"'{name}' is required and must be a string")
    return str(value)


def _texts(name: str, value: Any) -> list[str]:
    """Return one or several texts as a list. Cohere's documents may be objects with a field ``text``."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise RequestError(f"'{name}' must be a string or a list of strings")
    if len(items) > MOST_TEXTS:
        raise RequestError(f"'{name}' has {len(items)} texts; the maximum is {MOST_TEXTS}")
    contents = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [text for text in contents if isinstance(text, str)]
    if len(texts) < len(items):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    return texts
