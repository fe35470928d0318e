"""The outputs of requests, with the field names of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...errors import InvalidSamplingError, ProviderRuntimeError
from ...records import dataclass
from ...reports import html_table

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (natural logarithm) of one token under the model's own, unmodified distribution."""

    token_id: int
    logprob: float
    rank: int  # in the whole vocabulary; 1 is the most likely token
    text: str
    partial: tuple[int, ...] | None = None  # the bytes of a token that holds a part of a character

    @property
    def token_bytes(self) -> bytes:
        """The bytes of the token; those of consecutive tokens form the text."""
        return self.text.encode() if self.partial is None else bytes(self.partial)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model asks for, or a piece of one.

    In the difference of two states, a call without ``id`` has further arguments of the call before it.
    """

    id: str
    name: str
    arguments: str  # JSON text as the model wrote it, not checked against the function's schema


@dataclass(frozen=True, slots=True)
class PictureUsage:
    """What a picture of a prompt takes.

    Args:
        width: pixels in which the model sees it, after it was resized.
        height: see there.
        tokens: of the prompt.
    """

    width: int
    height: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: generated tokens of all continuations.
        cached_tokens: tokens of the prompt whose KV was reused.
        reasoning_tokens: the generated tokens that are reasoning.
        prompt_seconds: from the start of the computation to the first token; 0 if it is not known.
        decode_seconds: from the first to the last token; 0 if it is not known.
        pictures: of the prompt, in order.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    prompt_seconds: float = field(default=0.0, compare=False)
    decode_seconds: float = field(default=0.0, compare=False)
    pictures: tuple[PictureUsage, ...] = ()


@dataclass(slots=True, kw_only=True)  # not frozen: that makes each of the many objects 1 us slower to create
class Delta:
    """The new part of a continuation. The concatenation of all deltas is the whole continuation.

    In a service, the first delta of a request is empty: it comes as soon as the request is queued, so that a
    client sees the beginning of its stream and not the silence of a long prompt.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[dict[int, Logprob]] = ()  # one entry per token, if requested
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()  # calls and pieces of calls; see ``ToolCall``
    prompt_logprobs: Sequence[dict[int, Logprob] | None] = ()  # in one delta, if requested
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None  # in the last delta of the request
    prompt_tokens: int = 0  # length of the prompt in tokens
    cached_tokens: int = 0  # those of them whose KV was reused
    reasoning_tokens: int = 0  # so many of ``token_ids``, the first ones, are reasoning
    computed_prompt_tokens: int | None = None  # of a delta that tells only how far the prompt is computed
    prompt_token_ids: Sequence[int] = ()  # in the first delta, if requested

    @property
    def opens(self) -> bool:
        """Whether the delta has no part of the answer, and tells that the request is queued or under way."""
        return not (self.token_ids or self.text or self.reasoning or self.tool_calls or self.finish_reason
                    or self.usage)  # fmt: skip


def summed(deltas: Sequence[Delta]) -> Delta:
    """Return the concatenation of deltas of one continuation as one delta.

    Args:
        deltas: at least one, in their order; the counts and reasons are those of the last that has them.
    """
    if len(deltas) == 1:
        return deltas[0]
    last, end = deltas[-1], next((delta for delta in reversed(deltas) if delta.finish_reason), None)
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=merged_calls(call for delta in deltas for call in delta.tool_calls),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ()),
        finish_reason=None if end is None else end.finish_reason,
        stop_reason=None if end is None else end.stop_reason,
        usage=last.usage,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        reasoning_tokens=sum(delta.reasoning_tokens for delta in deltas),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), ()),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One generated output. In a chat, ``text`` is the answer without reasoning and tool calls.

    While streaming, each state holds everything so far; ``since(previous state)`` is the new part.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while running
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # one dict per token, keyed by token id
    cumulative_logprob: float | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0  # tokens that added to the reasoning

    def since(self, earlier: CompletionOutput | None) -> CompletionOutput:
        """Return what is new in this state compared with an ``earlier`` one; None returns everything.

        ``text``, ``token_ids``, ``logprobs``, ``reasoning_content``, ``tool_calls`` and ``reasoning_tokens``
        hold the new part, the other fields their current value.
        """
        if earlier is None:
            return self
        thought = (self.reasoning_content or "")[len(earlier.reasoning_content or "") :]
        return dataclasses.replace(
            self,
            text=self.text[len(earlier.text) :],
            token_ids=self.token_ids[len(earlier.token_ids) :],
            logprobs=None if self.logprobs is None else self.logprobs[len(earlier.logprobs or ()) :],
            reasoning_content=thought or None,
            tool_calls=_calls_since(self.tool_calls, earlier.tool_calls),
            reasoning_tokens=self.reasoning_tokens - earlier.reasoning_tokens,
        )


def merged_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Return calls with the arguments of their pieces; a first piece without ``id`` stays as it is."""
    arguments: list[list[str]] = []
    heads: list[ToolCall] = []
    for piece in pieces:
        if piece.id or not heads:
            heads.append(piece)
            arguments.append([])
        arguments[-1].append(piece.arguments)
    return [
        dataclasses.replace(head, arguments="".join(each))
        for head, each in zip(heads, arguments, strict=True)
    ]


def _calls_since(calls: list[ToolCall], earlier: list[ToolCall]) -> list[ToolCall]:
    """Return the calls after an earlier state, whose last call may have grown."""
    grown = []
    if earlier:
        last, before = calls[len(earlier) - 1], earlier[-1]
        if len(last.arguments) > len(before.arguments):
            grown = [ToolCall("", "", last.arguments[len(before.arguments) :])]
    return grown + calls[len(earlier) :]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic``, and its token counts."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was reused instead of computed
    proposed_tokens: int = 0  # tokens that speculation proposed
    accepted_tokens: int = 0  # proposed tokens that became output


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: final from ``generate``, growing from ``stream``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # `n` of them
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: str | None = None  # set when finish_reason is "error"
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one per token, None for the first
    embedding: npt.NDArray[np.float32] | None = None  # [hidden_size], only of embedding requests
    invalid: bool = False  # whether ``error`` is a fault of the request, such as a grammar of too much work

    def check(self) -> None:
        """Check that the request did not fail.

        Raises:
            InvalidSamplingError: it failed by its own fault.
            ProviderRuntimeError: it failed for another reason.
        """
        if self.error is not None:
            raise (InvalidSamplingError if self.invalid else ProviderRuntimeError)(self.error)

    def _repr_html_(self) -> str:
        """Return the prompt and its outputs as an HTML table, for notebooks."""
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} tokens"
        rows = [("prompt", prompt)]
        rows += [
            (f"{one.finish_reason or 'so far'}, {len(one.token_ids)} tokens", one.text)
            for one in self.outputs
        ]
        rows += [("error", self.error)] if self.error is not None else []
        return html_table(f"request {self.request_id}", rows)
