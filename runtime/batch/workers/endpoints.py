"""Answer the body of a line with one engine: the service's readers and writers, driven step by step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import RequestError, UnsupportedTaskError
from ....records import dataclass
from ...api.embedding import embedding_questions, text_inputs
from ...api.requests import RENDER_OPTIONS, PooledPrompt, Prompt, RequestFactory
from ...api.scoring import (
    ContinuationScore,
    Questions,
    chat_score_questions,
    rerank_questions,
    score_questions,
)
from ...api.vectors import stacked
from ...engine.requests.request_group import RequestGroup
from ...service.core.chat import Conversation
from ...service.core.messages import (
    Embeddings,
    Generation,
    GenerationRequest,
    refuse_left_out,
    with_gap,
    with_schema_read,
)
from ...service.http.openai import scoring
from ...service.http.openai.embeddings import KNOWN as EMBEDDINGS_FIELDS
from ...service.http.openai.embeddings import embeddings_response, read_embeddings
from ...service.http.openai.endpoints import ENDPOINTS
from ...service.http.openai.reading import IGNORED
from ...service.http.openai.response_builder import ResponseBuilder
from ...service.http.openai.responses import KNOWN, ResponseAsk, not_included, read_response
from ...text.chat_template import check_variables
from ...text.infill import Infill, infill_tokens
from ..inputs.lines import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, BatchLine

# Options that need stored responses or a streaming client. A batch accepts only these values.
_ONLY: dict[str, Any] = {"stream": False, "background": False, "previous_response_id": None}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def read_line(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ResponseAsk:
    """Return the parsed body of a line.

    Args:
        body: the body of the line.
        defaults: default sampling options.

    Raises:
        RequestError: a field is invalid, or not supported in a batch.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in (*fields, *not_included(fields)):
        if name not in KNOWN:
            raise RequestError(f"unknown field '{name}'; known fields: {', '.join(sorted(KNOWN))}")
    for name, value in _ONLY.items():
        if fields.get(name, value) != value:
            raise RequestError(f"'{name}': {fields[name]!r} is not supported in a batch, only {value!r}")
    return read_response({**fields, "store": False}, defaults, [])


def response_body(ask: ResponseAsk, result: Generation, model: str, created: int) -> Json:
    """Return the response object of a finished generation.

    Args:
        ask: the parsed request.
        result: the generation; its first choice is the answer.
        model: the model name in the response.
        created: the creation time, as Unix time.
    """
    builder = ResponseBuilder(ask, model)
    answer = dataclasses.replace(result.choices[0], usage=result.usage)
    for _ in builder.of(answer):  # a batch does not need the events
        pass
    output = [
        {**item, "id": f"{_PREFIXES[item['type']]}_{result.request_id}_{position}"}
        for position, item in enumerate(builder.output)
    ]
    return {**builder.response, "id": f"resp_{result.request_id}", "created_at": created, "output": output}


Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A line as requests to an engine.

    Args:
        groups: the request groups: one for a generation, one for each text or document otherwise.
            Empty for embeddings that the encoder computes.
        read: returns the response body and the finish reason, once the requests have ended.
        timeout: time limit in seconds, counted from the moment the requests enter the engine; None is none.
    """

    groups: Sequence[RequestGroup]
    read: Callable[[], tuple[Json, str]]
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
            UnsupportedTaskError: the line is for a model of another kind.
        """
        if line.url not in _KINDS:
            raise UnsupportedTaskError(
                f"the model '{self.model}' is a language model; it cannot answer {line.url}"
            )
        return _KINDS[line.url](self, line)

    def generation(self, line: BatchLine) -> Work:
        """Return the requests of a completion or a chat completion."""
        asked = read_generation(line, self.defaults, self.seed)
        request, name = asked.request, line.body.get("model")
        if isinstance(request.prompt, Infill):
            request = with_gap(request, *infill_tokens(self.requests.tokenizer, request.prompt))
        lora = name if name in self.requests.adapters.names else None
        group = self.requests.group(
            self._prompt(request),
            request.params,
            request_id=_name(line),
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            lora=lora,
        )

        def read() -> tuple[Json, str]:
            result = _generation(group, line.number)
            return asked.body(result, lora or self.model, self.created), result.reason

        return Work([group], read, request.timeout)

    def embeddings(self, line: BatchLine) -> Work:
        """Return the requests of the embeddings of one or several texts."""
        ask = read_embeddings(known_fields_of(line, EMBEDDINGS_FIELDS))
        if ask.prompt is not None:
            raise RequestError(f"the model '{self.model}' has no prompts by name; omit 'prompt_name'")
        if ask.late_chunking:
            raise UnsupportedTaskError(f"the model '{self.model}' has no late chunking; encoders have it")
        pooling = ask.pooling or "last"
        tokens_of = self.requests.cut_token_ids if ask.truncate else self.requests.token_ids
        texts = [tokens_of(text) for text in text_inputs(ask.inputs)]
        prompts = [PooledPrompt(tokens, pooling) for tokens in texts]

        def answer(vectors: npt.NDArray[np.float32]) -> tuple[Json, str]:
            return embeddings_response(ask, Embeddings(vectors, sum(map(len, texts))), self.model), "stop"

        if not self.embedding_size:  # the engine gives no hidden states: use the encoder's session
            encoder = self.requests.encoder
            return Work([], lambda: answer(stacked(*encoder.embed(texts, pooling), normalize=ask.normalize)))
        return self._asked(
            line,
            [embedding_questions(prompts)],
            lambda vectors: answer(stacked(vectors, self.embedding_size, normalize=ask.normalize)),
        )

    def score(self, line: BatchLine) -> Work:
        """Return the requests of log-probabilities of continuations, or of scores of documents."""
        ask, name = scoring.read_score(known_fields_of(line, scoring.SCORE)), _name(line)
        if isinstance(ask, scoring.ContinuationsAsk):
            questions = self._continuations(ask)
            return self._asked(
                line,
                [questions],
                lambda results: (
                    _with_usage(scoring.continuations_response(results, self.model, name), [questions]),
                    "stop",
                ),
            )
        pairs = [
            rerank_questions(self.requests, query, [document], ask.instruction, ("yes", "no"))
            for query, document in zip(ask.queries, ask.documents, strict=True)
        ]
        return self._asked(
            line,
            pairs,
            lambda results: (_with_usage(scoring.pairs_response(results, self.model, name), pairs), "stop"),
        )

    def _continuations(self, ask: scoring.ContinuationsAsk) -> Questions[ContinuationScore]:
        talk = ask.text
        if isinstance(talk, str):
            return score_questions(self.requests, talk, ask.continuations)
        check_variables(talk.variables, RENDER_OPTIONS)
        return chat_score_questions(
            self.requests,
            talk.turns(),
            ask.continuations,
            tools=talk.tools or None,
            continue_final_message=talk.continues,
            **talk.variables,
        )

    def rerank(self, line: BatchLine) -> Work:
        """Return the requests that rank documents by their relevance to a query, the best first."""
        ask = scoring.read_rerank(known_fields_of(line, scoring.RERANK))
        questions = rerank_questions(self.requests, ask.query, ask.documents, ask.instruction, ("yes", "no"))

        def answer(scores: list[float]) -> tuple[Json, str]:
            found = scoring.rerank_response(ask, scores, self.model, _name(line))
            return _with_usage(found, [questions]), "stop"

        return self._asked(line, [questions], answer)

    def _asked(
        self,
        line: BatchLine,
        questions: Sequence[Questions[T]],
        answer: Callable[[list[T]], tuple[Json, str]],
    ) -> Work:
        pairs = [pair for each in questions for pair in zip(each.prompts, each.params, strict=True)]
        groups = [
            self.requests.group(prompt, params, request_id=f"{_name(line)}-{index}")
            for index, (prompt, params) in enumerate(pairs)
        ]

        def read() -> tuple[Json, str]:
            left = (group.output() for group in groups)
            parts = [each.read(list(itertools.islice(left, len(each.prompts)))) for each in questions]
            return answer([result for part in parts for result in part])

        return Work(groups, read)

    def _prompt(self, request: GenerationRequest) -> Prompt:
        turns = request.prompt
        if not isinstance(turns, Conversation):
            assert not isinstance(turns, Infill)  # noqa: S101 -- ``generation`` has made tokens of it
            return turns
        reserved = sorted(RENDER_OPTIONS & set(turns.variables))
        if reserved:
            raise RequestError(f"'chat_template_kwargs' must not contain '{reserved[0]}', which is reserved")
        return self.requests.chat_prompt(
            turns.turns(),
            tools=turns.tools or None,
            continue_final_message=turns.continues,
            called=turns.called,
            parallel_calls=turns.parallel_calls,
            **turns.variables,
        )


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
    fields = {**line.body}
    if fields.get("seed") is None:
        fields["seed"] = line_seed(job_seed, line.number)
    if line.url == RESPONSES:
        ask = read_line(fields, defaults)
        return Generating(
            refuse_left_out(with_schema_read(ask.request)), functools.partial(response_body, ask)
        )
    endpoint = ENDPOINTS[line.url]
    request = refuse_left_out(with_schema_read(endpoint.request({**defaults, **fields})))

    def body(result: Generation, model: str, created: int) -> Json:
        found = {**endpoint.response(request, result, model), "created": created}
        # Cached tokens depend on earlier requests; a result must not.
        details = found["usage"].pop("prompt_tokens_details")
        if images := details.keys() - {"cached_tokens"}:
            found["usage"]["prompt_tokens_details"] = {name: details[name] for name in sorted(images)}
        return found

    return Generating(request, body)


def line_seed(job_seed: int, number: int) -> int:
    """Return the default seed of a line; it depends on the job's seed and the line's number only."""
    digest = hashlib.blake2b(f"{job_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _generation(group: RequestGroup, number: int) -> Generation:
    """Return the result of a group that has ended; it depends on the line alone, not on what the cache had.

    Raises:
        InvalidSamplingError, ProviderRuntimeError: the request failed; see ``RequestGroup.failure``.
        RequestCancelled: the line's timeout passed.
    """
    deltas = group.read()
    if (failure := group.failure) is not None:
        raise failure
    result = Generation.of(deltas)
    for choice in result.choices:
        choice.tool_calls = [
            dataclasses.replace(call, id=_call_id(number, choice.index, position))
            for position, call in enumerate(choice.tool_calls)
        ]
    usage = dataclasses.replace(result.usage, cached_tokens=0)
    return dataclasses.replace(result, usage=usage)


def _call_id(*place: int) -> str:
    """Return the id of a tool call: 9 letters and digits as in Mistral's API, equal in every run."""
    return hashlib.blake2b(repr(place).encode()).hexdigest()[:9]


def _name(line: BatchLine) -> str:
    return f"batch_req_{line.number}"


def known_fields_of(line: BatchLine, known: Collection[str]) -> Json:
    """Return the body of a line without null values.

    Raises:
        RequestError: a field is unknown; an answer in a file has no header that could name it.
    """
    fields = {name: value for name, value in line.body.items() if value is not None}
    unknown = sorted(set(fields) - set(known) - set(IGNORED))
    if unknown:
        raise RequestError(f"unknown field '{unknown[0]}'; known fields: {', '.join(sorted(known))}")
    return fields


def _with_usage(body: Json, questions: Sequence[Questions[Any]]) -> Json:
    prompts: list[Any] = [prompt for each in questions for prompt in each.prompts]
    total = sum(len(getattr(prompt, "token_ids", prompt)) for prompt in prompts)
    return {**body, "usage": {"prompt_tokens": total, "total_tokens": total}}
