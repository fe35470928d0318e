"""The outputs of requests, with the field names of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from ...errors import InvalidSamplingError, ProviderRuntimeError
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


class Record(Protocol):
    """A part of a request's output, which makes the value of a field when it is first read."""

    def fields(self, name: str) -> Mapping[str, Any]:
        """Return a field of ``CompletionOutput`` or ``RequestOutput``, and those made together with it."""

    def after(self, earlier: Self) -> Self:
        """Return the part that follows an earlier part."""

    def catch_up(self) -> None:
        """Compute the expensive fields now, so that errors are raised here."""


class _Lazy:
    """Base of outputs whose unset fields are made from a record when they are first read."""

    __slots__ = ("_record",)

    _record: Record | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _MADE or self._record is None:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            made = self._record.fields(name)
            for field_name, value in made.items():
                setattr(self, field_name, value)
            return made[name]

    def __post_init__(self) -> None:
        self._record = None

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        return type(self), tuple(getattr(self, each.name) for each in fields)

    @property
    def record(self) -> Record | None:
        """The source of unset fields; None if all fields are set."""
        return self._record

    @classmethod
    def _of(cls, record: Record, **fields: Any) -> Self:
        made = cls.__new__(cls)
        made._record = record  # noqa: SLF001 -- our own
        for name, value in fields.items():
            setattr(made, name, value)
        return made


_MADE = frozenset({"text", "token_ids", "logprobs", "reasoning_content", "tool_calls", "reasoning_tokens",
                   "prompt_logprobs"})  # fmt: skip


@dataclass(slots=True)
class CompletionOutput(_Lazy):
    """One generated output. In a chat, ``text`` is the answer without reasoning and tool calls.

    While streaming, each state holds everything so far, and makes a field only when it is read. Reading
    ``since(previous state)`` costs time for the new tokens only.
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

    @classmethod
    def of(
        cls,
        record: Record,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
        cumulative_logprob: float | None,
        index: int = 0,
    ) -> Self:
        """Return an output whose other fields are made when they are read."""
        made = cls._of(record)  # without keywords, since each token makes one
        made.index, made.finish_reason, made.stop_reason = index, finish_reason, stop_reason
        made.cumulative_logprob = cumulative_logprob
        return made

    def catch_up(self) -> None:
        """Make the text now, in the calling thread, if it is missing.

        Raises:
            Exception: the tokenizer or a parser failed.
        """
        if self._record is not None:
            self._record.catch_up()

    def since(self, earlier: CompletionOutput | None) -> CompletionOutput:
        """Return what is new in this state compared with an ``earlier`` one; None returns everything.

        ``text``, ``token_ids``, ``logprobs``, ``reasoning_content``, ``tool_calls`` and ``reasoning_tokens``
        hold the new part, the other fields their current value.
        """
        if earlier is None:
            return self
        if self.record is not None and earlier.record is not None:
            record = self.record.after(earlier.record)
            return self.of(record, self.finish_reason, self.stop_reason, self.cumulative_logprob, self.index)
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
class RequestOutput(_Lazy):
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

    @classmethod
    def of(cls, record: Record, **fields: Any) -> Self:
        """Return an output from its fields; ``prompt_logprobs`` is made from ``record`` when it is read."""
        return cls._of(record, **fields)

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
