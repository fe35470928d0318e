"""Scoring: log-probabilities of given continuations, and reranking by a yes-or-no question."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Generic, TypeVar

from ...errors import ProviderRuntimeError, RequestError, UsageError
from ...records import dataclass
from ..text.chat_template import Message
from ..types.outputs import Logprob, RequestOutput
from ..types.sampling_params import SamplingParams
from .requests import ChatPrompt, Prompt, RequestFactory

T = TypeVar("T")

# The prompts that Qwen3-Reranker was trained with (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
RERANK_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The log-probability (natural) of a continuation, and of each of its tokens.

    Args:
        logprob: of the whole continuation.
        token_ids: its tokens.
        token_logprobs: of each token.
        greedy: whether each token was the most likely one.
        prompt_tokens: the number of tokens of text and continuation.
        cached_tokens: those of them whose KV was reused.
    """

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    greedy: bool
    prompt_tokens: int = field(default=0, compare=False)
    cached_tokens: int = field(default=0, compare=False)

    @property
    def mean(self) -> float:
        """The mean log-probability of a token, by which texts of several lengths are compared."""
        return self.logprob / len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A text and its continuation as one prompt; ``start`` is the first token of the continuation."""

    prompt: list[int] | ChatPrompt
    start: int

    @property
    def token_ids(self) -> list[int]:
        """The tokens of text and continuation."""
        return self.prompt.token_ids if isinstance(self.prompt, ChatPrompt) else self.prompt

    @property
    def params(self) -> SamplingParams:
        """The options that report the log-probabilities of the continuation."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=self.start
        )


@dataclass(frozen=True, slots=True)
class Questions(Generic[T]):
    """Prompts with their options, and a function that reads the results from their outputs."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    read: Callable[[Sequence[RequestOutput]], list[T]]


def score_questions(
    requests: RequestFactory, texts: str | Sequence[str], continuations: str | Sequence[str]
) -> Questions[ContinuationScore]:
    """Return the requests that score each continuation of its text.

    Raises:
        RequestError: a text or a continuation is invalid.
        UsageError: there are not as many texts as continuations.
    """
    return _questions([scoring_request(requests, *pair) for pair in paired(texts, continuations)])


def chat_score_questions(
    requests: RequestFactory,
    messages: Sequence[Message],
    continuations: Sequence[str],
    *,
    continue_final_message: bool = False,
    **variables: Any,
) -> Questions[ContinuationScore]:
    """Return the requests that score each of several answers to a conversation, from their first token on.

    Args:
        requests: makes requests for the model.
        messages: see ``RequestFactory.chat_prompt``.
        continuations: the answers, or what follows the last message.
        continue_final_message: see there.
        **variables: see there.

    Raises:
        RequestError: the conversation or a continuation is invalid.
    """
    rendering = {"continue_final_message": continue_final_message, **variables}
    before = requests.chat_prompt(messages, **rendering)
    wanted = []
    for text in continuations:
        whole = requests.chat_prompt(messages, begun=text, **rendering)
        start = _boundary(before.token_ids, whole.token_ids)
        wanted.append(ScoringRequest(dataclasses.replace(whole, frame=None), start))
    return _questions(wanted)


def _questions(wanted: Sequence[ScoringRequest]) -> Questions[ContinuationScore]:
    def read(outputs: Sequence[RequestOutput]) -> list[ContinuationScore]:
        return [continuation_score(*pair) for pair in zip(wanted, outputs, strict=True)]

    return Questions([each.prompt for each in wanted], [each.params for each in wanted], read)


def rerank_questions(
    requests: RequestFactory, query: str, documents: Sequence[str], instruction: str, answers: Sequence[str]
) -> Questions[float]:
    """Return the requests that give the probability that each document answers the query.

    Raises:
        RequestError: a prompt is invalid, or two answers begin with the same token.
    """
    params = answer_params(requests, answers)
    prompts = [rerank_prompt(requests, query, document, instruction) for document in documents]

    def read(outputs: Sequence[RequestOutput]) -> list[float]:
        return [share_of_first(params, output) for output in outputs]

    return Questions(prompts, [params] * len(prompts), read)


def scoring_request(requests: RequestFactory, text: str, continuation: str) -> ScoringRequest:
    """Tokenize text and continuation together; a token across the boundary belongs to the continuation.

    Raises:
        RequestError: one of them is empty.
    """
    before, whole = requests.token_ids(text), requests.token_ids(text + continuation)
    return ScoringRequest(whole, _boundary(before, whole))


def _boundary(before: Sequence[int], whole: Sequence[int]) -> int:
    """Return the first token of a continuation, from the tokens before it and those of the whole."""
    pairs = enumerate(zip(before, whole, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole)))
    if start == 0 and before and len(whole) > 0:
        raise RequestError(
            "the text is so short that it is one token with the beginning of its continuation; score the "
            "continuation after a longer text"
        )
    if not 0 < start < len(whole):
        raise RequestError(
            "a continuation is scored after a text of at least one token; neither may be empty"
        )
    return start


def continuation_score(request: ScoringRequest, output: RequestOutput) -> ContinuationScore:
    """Return the score from the output of a scoring request.

    Raises:
        ProviderRuntimeError: the request failed.
    """
    if output.error is not None or output.prompt_logprobs is None:
        raise ProviderRuntimeError(output.error or "the request gave no log-probabilities")
    tokens = request.token_ids[request.start :]
    entries = zip(tokens, output.prompt_logprobs[request.start :], strict=True)
    token_logprobs: list[Logprob] = [(entry or {})[token] for token, entry in entries]
    logprobs = [entry.logprob for entry in token_logprobs]
    return ContinuationScore(
        math.fsum(logprobs),
        tokens,
        logprobs,
        all(entry.rank == 1 for entry in token_logprobs),
        len(request.token_ids),
        output.metrics.cached_tokens if output.metrics else 0,
    )


def paired(texts: str | Sequence[str], continuations: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair each continuation with its text; one text may serve all continuations.

    Raises:
        UsageError: there are not as many texts as continuations.
    """
    ends = [continuations] if isinstance(continuations, str) else list(continuations)
    begins = [texts] * len(ends) if isinstance(texts, str) else list(texts)
    if len(begins) != len(ends):
        raise UsageError(f"{len(begins)} texts for {len(ends)} continuations; pass one, or one for each")
    return list(zip(begins, ends, strict=True))


def rerank_prompt(requests: RequestFactory, query: str, document: str, instruction: str) -> ChatPrompt:
    """Return the prompt that asks whether a document answers a query, with reasoning disabled."""
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": RERANK_SYSTEM}, {"role": "user", "content": asked}]
    return requests.chat_prompt(messages, enable_thinking=False)


def answer_params(requests: RequestFactory, answers: Sequence[str]) -> SamplingParams:
    """Return options that report the log-probability of each answer's first token.

    Raises:
        RequestError: an answer has no token, or two answers begin with the same token.
    """
    tokens = [requests.encode(answer, add_special_tokens=False)[:1] for answer in answers]
    if not all(tokens) or len({token for (token,) in tokens}) != len(answers):
        raise RequestError(f"the answers {answers} must not be empty and must begin with different tokens")
    named = tuple(token for (token,) in tokens)
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=named)


def share_of_first(params: SamplingParams, output: RequestOutput) -> float:
    """Return the probability of the first answer, relative to all answers.

    Raises:
        ProviderRuntimeError: the request failed.
    """
    if output.error is not None or not output.outputs[0].logprobs:
        raise ProviderRuntimeError(output.error or "the request gave no log-probabilities")
    entries = output.outputs[0].logprobs[0]
    logprobs = [entries[token].logprob for token in params.logprob_token_ids]
    return 1.0 / math.fsum(math.exp(min(logprob - logprobs[0], 700.0)) for logprob in logprobs)
