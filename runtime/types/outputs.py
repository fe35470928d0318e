"""What a request gives back; shaped like vLLM's, since that is what people know."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from ...reports import html_table

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, under the model's own (unmodified) distribution."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token of the whole vocabulary
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it: not checked against the function's schema


class Record(Protocol):
    """A part of what was generated for a request, from which fields are made when they are first read."""

    def field(self, name: str) -> Any:
        """The value of a field of ``CompletionOutput`` or ``RequestOutput``."""

    def after(self, earlier: Self) -> Self:
        """The part that came after another."""

    def catch_up(self) -> None:
        """Make what of the fields costs much, once for all parts, or fail now."""


class _Lazy:
    """Fields that are not set are made from a record at their first use, and kept."""

    __slots__ = ("_record",)

    _record: Record | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _MADE or self._record is None:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            value = self._record.field(name)
            setattr(self, name, value)
            return value

    def __post_init__(self) -> None:
        self._record = None

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        return type(self), tuple(getattr(self, each.name) for each in fields)

    @property
    def record(self) -> Record | None:
        """What fields are made from; None where all are made."""
        return self._record

    @classmethod
    def _of(cls, record: Record, **fields: Any) -> Self:
        made = cls.__new__(cls)
        made._record = record  # noqa: SLF001 -- our own
        for name, value in fields.items():
            setattr(made, name, value)
        return made


_MADE = frozenset({"text", "token_ids", "logprobs", "reasoning_content", "tool_calls", "prompt_logprobs"})


@dataclass(slots=True)
class CompletionOutput(_Lazy):
    """One generated continuation. In a chat, ``text`` is the answer without reasoning and tool calls.

    While streaming, each state holds everything so far, but makes a field only when it is read: whoever reads
    ``since(the state before)`` does work for the new tokens alone.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while still running
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token, by token id
    cumulative_logprob: float | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        record: Record,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
        cumulative_logprob: float | None,
        index: int = 0,
    ) -> Self:
        """An output whose other fields are made when they are read."""
        return cls._of(
            record,
            index=index,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=cumulative_logprob,
        )

    def catch_up(self) -> None:
        """Make the text now, in the thread of the reader, unless it is made.

        Raises:
            Exception: the tokenizer or a parser failed.
        """
        if self._record is not None:
            self._record.catch_up()

    def since(self, earlier: CompletionOutput | None) -> CompletionOutput:
        """What this state has more than an earlier one of the same continuation; None: than nothing.

        ``text``, ``token_ids``, ``logprobs``, ``reasoning_content`` and ``tool_calls`` hold what is new, the
        other fields what they are now.
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
            tool_calls=self.tool_calls[len(earlier.tool_calls) :],
        )


@dataclass(slots=True)
class RequestMetrics:
    """Moments of one request's life, in seconds of a monotonic clock."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was reused instead of computed
    proposed_tokens: int = 0  # tokens that speculation proposed
    accepted_tokens: int = 0  # those of them that became output


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a token, None for the first
    embedding: npt.NDArray[np.float32] | None = None  # [hidden_size], of a prompt that is to be embedded

    @classmethod
    def of(cls, record: Record, **fields: Any) -> Self:
        """An output with all fields but ``prompt_logprobs`` given, which is made when it is read."""
        return cls._of(record, **fields)

    def _repr_html_(self) -> str:
        """The prompt and its texts as a table, for notebooks."""
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} tokens"
        rows = [("prompt", prompt)]
        rows += [
            (f"{one.finish_reason or 'so far'}, {len(one.token_ids)} tokens", one.text)
            for one in self.outputs
        ]
        rows += [("error", self.error)] if self.error is not None else []
        return html_table(f"request {self.request_id}", rows)
