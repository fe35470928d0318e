"""What each url asks of a model: bodies to requests, outputs to bodies.

Completions, chat and responses are OpenAI's, as the service reads them; embeddings are OpenAI's;
`/v1/rerank` follows Jina's and Cohere's shape; `/v1/score` gives log-probabilities of continuations.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError, RequestCancelled, RequestError
from ...api.embedding import check_pooling, embedding_questions, stacked
from ...api.requests import Prompt, RequestFactory
from ...api.scoring import RERANK_INSTRUCTION, ContinuationScore, Questions, rerank_questions, score_questions
from ...engine.requests.request_group import RequestGroup
from ...service.core.messages import Choice, Conversation, Generation, GenerationRequest, Usage
from ...service.http.openai.endpoints import ENDPOINTS
from ...types.outputs import RequestOutput, ToolCall
from ..inputs.lines import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, BatchLine
from .responses import read_line, response_body

Json = dict[str, Any]
T = TypeVar("T")

# Names that a request's template variables may not take: they are arguments of the rendering itself.
_RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template", "template", "tool_style"}
_IGNORED = ("model", "user", "metadata", "store", "safety_identifier", "service_tier")


@dataclass(frozen=True, slots=True)
class Work:
    """A line as requests to an engine.

    Args:
        groups: of requests; one for a generation, one a text for embeddings.
        read: makes the response's body of their outputs, and says why the text ended.
        timeout: seconds that the requests may take from the moment they enter the engine.
    """

    groups: Sequence[RequestGroup]
    read: Callable[[Sequence[RequestOutput]], tuple[Json, str]]
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Preparer:
    """Turns lines into requests for one model. Thread-safe.

    Args:
        requests: makes the engine's requests.
        model: the name that responses state.
        embedding_size: width of the hidden states that the engine gives; 0 asks the factory's encoder.
        defaults: sampling options of lines that do not state them.
        seed: the job's; each line's own is derived from it and the line's number.
        created: the Unix time that responses state.
    """

    requests: RequestFactory
    model: str
    embedding_size: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    created: int = 0

    def prepare(self, line: BatchLine) -> Work:
        """The requests of a line.

        Raises:
            RequestError: the body is at fault.
        """
        return _KINDS[line.url](self, line)

    def generation(self, line: BatchLine) -> Work:
        """A completion, or an answer in a chat."""
        asked = read_generation(line, self.defaults, self.seed)
        request = asked.request
        group = self.requests.group(
            self._prompt(request),
            request.params,
            request_id=f"batch_req_{line.number}",
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )

        def read(outputs: Sequence[RequestOutput]) -> tuple[Json, str]:
            result = _generation(outputs[0], line.number)
            return asked.body(result, self.model, self.created), result.choices[0].finish_reason

        return Work([group], read, request.timeout)

    def embeddings(self, line: BatchLine) -> Work:
        """Vectors of one or several texts."""
        body = _fields(line.body, {"input", "encoding_format", "pooling", "normalize"})
        encoding, pooling = body.get("encoding_format", "float"), body.get("pooling", "last")
        if encoding not in ("float", "base64"):
            raise RequestError(f"'encoding_format' must be float or base64, not {encoding!r}")
        normalize = body.get("normalize", True)
        if not isinstance(normalize, bool):
            raise RequestError(f"'normalize' must be true or false, not {normalize!r}")
        check_pooling(pooling)
        texts = [self.requests.token_ids(text) for text in _inputs(body.get("input"))]

        def answer(vectors: npt.NDArray[np.float32]) -> tuple[Json, str]:
            data = [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
                for index, vector in enumerate(vectors)
            ]
            total = sum(map(len, texts))
            usage = {"prompt_tokens": total, "total_tokens": total}
            return {"object": "list", "data": data, "model": self.model, "usage": usage}, "stop"

        if not self.embedding_size:  # the engine's runner has none, a second session gives them
            return Work(
                [],
                lambda _: answer(stacked(*self.requests.encoder.embed(texts, pooling), normalize=normalize)),
            )
        questions = embedding_questions(texts, pooling)
        return self._asked(
            line,
            questions,
            lambda vectors: answer(stacked(vectors, self.embedding_size, normalize=normalize)),
        )

    def score(self, line: BatchLine) -> Work:
        """How likely continuations are after a text."""
        body = _fields(line.body, {"text", "continuations"})
        text, continuations = body.get("text"), body.get("continuations")
        if not isinstance(text, str):
            raise RequestError("'text' must be a text")
        questions = score_questions(self.requests, text, _texts("continuations", continuations))

        def answer(scores: list[ContinuationScore]) -> tuple[Json, str]:
            data = [
                {
                    "index": index,
                    "logprob": score.logprob,
                    "token_logprobs": score.token_logprobs,
                    "greedy": score.greedy,
                }
                for index, score in enumerate(scores)
            ]
            return {"object": "list", "data": data, "model": self.model, "usage": _usage(questions)}, "stop"

        return self._asked(line, questions, answer)

    def rerank(self, line: BatchLine) -> Work:
        """Which documents answer a query, the best first."""
        body = _fields(line.body, {"query", "documents", "top_n", "return_documents", "instruction"})
        query, documents = body.get("query"), _texts("documents", body.get("documents"))
        instruction = body.get("instruction", RERANK_INSTRUCTION)
        if not isinstance(query, str) or not isinstance(instruction, str):
            raise RequestError("'query' and 'instruction' must be texts")
        most = body.get("top_n", len(documents))
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise RequestError(f"'top_n' must be a whole number from 1 on, not {most!r}")
        questions = rerank_questions(self.requests, query, documents, instruction, ("yes", "no"))

        def answer(scores: list[float]) -> tuple[Json, str]:
            ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
            results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in ranked]
            if body.get("return_documents"):
                for result in results:
                    result["document"] = {"text": documents[result["index"]]}
            return {"model": self.model, "results": results, "usage": _usage(questions)}, "stop"

        return self._asked(line, questions, answer)

    def _asked(
        self, line: BatchLine, questions: Questions[T], answer: Callable[[list[T]], tuple[Json, str]]
    ) -> Work:
        pairs = zip(questions.prompts, questions.params, strict=True)
        groups = [
            self.requests.group(prompt, params, request_id=f"batch_req_{line.number}-{index}")
            for index, (prompt, params) in enumerate(pairs)
        ]
        return Work(groups, lambda outputs: answer(questions.read(outputs)))

    def _prompt(self, request: GenerationRequest) -> Prompt:
        if not isinstance(request.prompt, Conversation):
            return request.prompt
        turns = request.prompt
        reserved = sorted(_RESERVED & set(turns.variables))
        if reserved:
            raise RequestError(f"'chat_template_kwargs' may not name '{reserved[0]}'")
        return self.requests.chat_prompt(turns.messages, tools=turns.tools or None, **turns.variables)


_KINDS: dict[str, Callable[[Preparer, BatchLine], Work]] = {
    CHAT: Preparer.generation,
    COMPLETIONS: Preparer.generation,
    RESPONSES: Preparer.generation,
    EMBEDDINGS: Preparer.embeddings,
    RERANK: Preparer.rerank,
    SCORE: Preparer.score,
}


@dataclass(frozen=True, slots=True)
class Generating:
    """A line for a model that generates.

    Args:
        request: what it asks for.
        body: makes the response's body of the result, the model's name and a Unix time.
    """

    request: GenerationRequest
    body: Callable[[Generation, str, int], Json]


def read_generation(line: BatchLine, defaults: Mapping[str, Any], job_seed: int) -> Generating:
    """What a line asks of a model that generates.

    Args:
        line: for a completion, a chat or a response.
        defaults: sampling options that the line leaves out.
        job_seed: from which the seed of a line without one is derived.

    Raises:
        RequestError: the body is at fault.
    """
    own = {**line.body}
    if own.get("seed") is None:
        own["seed"] = line_seed(job_seed, line.number)
    if line.url == RESPONSES:
        ask = read_line(own, defaults)
        return Generating(ask.request, functools.partial(response_body, ask))
    endpoint = ENDPOINTS[line.url]
    request = endpoint.request({**defaults, **own})

    def body(result: Generation, model: str, created: int) -> Json:
        found = {**endpoint.response(request, result, model), "created": created}
        # How much was cached depends on what ran before, which a result must not.
        found["usage"].pop("prompt_tokens_details", None)
        return found

    return Generating(request, body)


def line_seed(job_seed: int, number: int) -> int:
    """The seed of a line that states none: the same wherever, and after whatever, the line runs."""
    digest = hashlib.blake2b(f"{job_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _generation(output: RequestOutput, number: int) -> Generation:
    """The whole of a finished request.

    Raises:
        ProviderRuntimeError: it failed.
        RequestCancelled: its timeout passed.
    """
    if output.error is not None:
        raise ProviderRuntimeError(output.error)
    choices = []
    for completion in output.outputs:
        if completion.finish_reason not in ("stop", "length"):
            raise RequestCancelled(
                "the line's timeout passed before it was finished; allow it more time, or fewer tokens"
            )
        calls = completion.tool_calls
        choices.append(
            Choice(
                index=completion.index,
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs or [],
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                reasoning=completion.reasoning_content or "",
                tool_calls=[
                    ToolCall(_call_id(number, completion.index, position), call.name, call.arguments)
                    for position, call in enumerate(calls)
                ],
            )
        )
    usage = Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cached_tokens=0,
    )
    return Generation(
        request_id=output.request_id,
        choices=choices,
        usage=usage,
        prompt_logprobs=output.prompt_logprobs or [],
    )


def _call_id(*place: int) -> str:
    """An id of a tool call that is the same in every run; nine letters and digits, as Mistral's have."""
    return hashlib.blake2b(repr(place).encode()).hexdigest()[:9]


def _fields(body: Mapping[str, Any], known: set[str]) -> Json:
    """The fields of a body that are not null.

    Raises:
        RequestError: one is unknown.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(f"unknown field '{unknown[0]}'; there are: {', '.join(sorted(known))}")
    return given


def _inputs(given: Any) -> list[str | list[int]]:
    """OpenAI's ``input``: a text, token ids, or a list of either."""
    listed = [given] if isinstance(given, str) or _is_token_ids(given) else given
    if not isinstance(listed, list) or not listed:
        raise RequestError("'input' must be a text, a list of token ids, or a list of these")
    if not all(isinstance(item, str) or _is_token_ids(item) for item in listed):
        raise RequestError("each item of 'input' must be a text or a list of token ids")
    return listed


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a list of texts")
    return value


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def _usage(questions: Questions[Any]) -> Json:
    prompts: list[Any] = list(questions.prompts)
    total = sum(len(getattr(prompt, "token_ids", prompt)) for prompt in prompts)
    return {"prompt_tokens": total, "total_tokens": total}
