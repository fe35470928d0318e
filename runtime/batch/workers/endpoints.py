"""Turn request bodies into engine requests, and outputs into response bodies, for each url.

Completions, chat, responses and embeddings follow OpenAI's API. `/v1/rerank` follows Jina's and Cohere's API.
`/v1/score` returns log-probabilities of continuations.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import RequestCancelled, RequestError
from ...api.embedding import check_pooling, embedding_questions, stacked
from ...api.requests import RENDER_OPTIONS, Prompt, RequestFactory
from ...api.scoring import RERANK_INSTRUCTION, ContinuationScore, Questions, rerank_questions, score_questions
from ...engine.requests.request_group import RequestGroup
from ...service.core.messages import Choice, Conversation, Generation, GenerationRequest, Usage
from ...service.http.openai.endpoints import ENDPOINTS
from ...types.outputs import RequestOutput, ToolCall
from ..inputs.lines import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, BatchLine
from .responses import read_line, response_body

Json = dict[str, Any]
T = TypeVar("T")

# Forbidden names of template variables: they are arguments of the rendering function.
_IGNORED = ("model", "user", "metadata", "store", "safety_identifier", "service_tier")


@dataclass(frozen=True, slots=True)
class Work:
    """A line as requests to an engine.

    Args:
        groups: the request groups: one for a generation, one for each text or document otherwise.
            Empty for embeddings that the encoder computes.
        read: returns the response body and the finish reason, from the outputs of the groups.
        timeout: time limit in seconds, counted from the moment the requests enter the engine; None is none.
    """

    groups: Sequence[RequestGroup]
    read: Callable[[Sequence[RequestOutput]], tuple[Json, str]]
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Preparer:
    """Turns lines into requests for one model. Thread-safe.

    Args:
        requests: creates the engine's requests.
        model: the model name in responses.
        embedding_size: width of the engine's hidden states; 0 uses the factory's encoder instead.
        defaults: defaults of the sampling options.
        seed: the seed of the job; the default seed of a line is derived from it and from the line's number.
        created: the creation time in responses, as Unix time.
    """

    requests: RequestFactory
    model: str
    embedding_size: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    created: int = 0

    def prepare(self, line: BatchLine) -> Work:
        """Return the requests of a line.

        Raises:
            RequestError: the body is not valid.
        """
        return _KINDS[line.url](self, line)

    def generation(self, line: BatchLine) -> Work:
        """Return the requests of a completion or a chat completion."""
        asked = read_generation(line, self.defaults, self.seed)
        request, name = asked.request, line.body.get("model")
        lora = name if name in self.requests.adapters.names else None
        group = self.requests.group(
            self._prompt(request),
            request.params,
            request_id=f"batch_req_{line.number}",
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            lora=lora,
        )

        def read(outputs: Sequence[RequestOutput]) -> tuple[Json, str]:
            result = _generation(outputs[0], line.number)
            return asked.body(result, lora or self.model, self.created), result.choices[0].finish_reason

        return Work([group], read, request.timeout)

    def embeddings(self, line: BatchLine) -> Work:
        """Return the requests of the embeddings of one or several texts."""
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

        if not self.embedding_size:  # the engine gives no hidden states: use the encoder's session
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
        """Return the requests of the log-probabilities of continuations of a text."""
        body = _fields(line.body, {"text", "continuations"})
        text, continuations = body.get("text"), body.get("continuations")
        if not isinstance(text, str):
            raise RequestError("'text' must be a string")
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
        """Return the requests that rank documents by their relevance to a query, the best first."""
        body = _fields(line.body, {"query", "documents", "top_n", "return_documents", "instruction"})
        query, documents = body.get("query"), _texts("documents", body.get("documents"))
        instruction = body.get("instruction", RERANK_INSTRUCTION)
        if not isinstance(query, str) or not isinstance(instruction, str):
            raise RequestError("'query' and 'instruction' must be strings")
        top_n = body.get("top_n", len(documents))
        if isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1:
            raise RequestError(f"'top_n' must be an integer of at least 1, not {top_n!r}")
        questions = rerank_questions(self.requests, query, documents, instruction, ("yes", "no"))

        def answer(scores: list[float]) -> tuple[Json, str]:
            ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
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
        reserved = sorted(RENDER_OPTIONS & set(turns.variables))
        if reserved:
            raise RequestError(f"'chat_template_kwargs' must not contain '{reserved[0]}', which is reserved")
        rendered = self.requests.chat_prompt(
            turns.messages,
            tools=turns.tools or None,
            continue_final_message=turns.continues,
            **turns.variables,
        )
        # As in the service, the template's parser does not read an answer that must consist of tool calls.
        return dataclasses.replace(rendered, new_parser=lambda: None) if turns.must_call else rendered


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
        # Cached tokens depend on earlier requests; a result must not.
        found["usage"].pop("prompt_tokens_details", None)
        return found

    return Generating(request, body)


def line_seed(job_seed: int, number: int) -> int:
    """Return the default seed of a line; it depends on the job's seed and the line's number only."""
    digest = hashlib.blake2b(f"{job_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _generation(output: RequestOutput, number: int) -> Generation:
    """Convert the output of a finished request.

    Raises:
        InvalidSamplingError, ProviderRuntimeError: the request failed; see ``RequestOutput.check``.
        RequestCancelled: the line's timeout passed.
    """
    output.check()
    choices = []
    for completion in output.outputs:
        if completion.finish_reason not in ("stop", "length"):
            raise RequestCancelled(
                "the line's timeout passed before it was finished; raise the timeout or lower max_tokens"
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
        reasoning_tokens=sum(completion.reasoning_tokens for completion in output.outputs),
    )
    return Generation(
        request_id=output.request_id,
        choices=choices,
        usage=usage,
        prompt_logprobs=output.prompt_logprobs or [],
    )


def _call_id(*place: int) -> str:
    """Return the id of a tool call: 9 letters and digits as in Mistral's API, equal in every run."""
    return hashlib.blake2b(repr(place).encode()).hexdigest()[:9]


def _fields(body: Mapping[str, Any], known: set[str]) -> Json:
    """Return the fields of a body that are not null.

    Raises:
        RequestError: a field is unknown.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(f"unknown field '{unknown[0]}'; known fields: {', '.join(sorted(known))}")
    return given


def _inputs(given: Any) -> list[str | list[int]]:
    """Return OpenAI's ``input`` (a string, token ids, or a list of these) as a list."""
    listed = [given] if isinstance(given, str) or _is_token_ids(given) else given
    if not isinstance(listed, list) or not listed:
        raise RequestError("'input' must be a string, a list of token ids, or a list of these")
    if not all(isinstance(item, str) or _is_token_ids(item) for item in listed):
        raise RequestError("each item of 'input' must be a string or a list of token ids")
    return listed


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a list of strings that is not empty")
    return value


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def _usage(questions: Questions[Any]) -> Json:
    prompts: list[Any] = list(questions.prompts)
    total = sum(len(getattr(prompt, "token_ids", prompt)) for prompt in prompts)
    return {"prompt_tokens": total, "total_tokens": total}
