"""Results of generation calls, joined from the parts of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, Generic, Literal, TypeVar

from ..errors import ServiceUnavailableError
from ..proto import generation_pb2 as pb
from ..records import dataclass

FinishReason = Literal["stop", "length", "cancelled", "tool_calls", "timeout"]

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_TIMEOUT: "timeout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation of a prompt.

    Args:
        finish_reason: ``length`` means that max_tokens or the context length was reached.
        stop_reason: the stop string or token id that ended it; None for the model's end token.
        logprobs: one entry per token, if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: list[pb.TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Completion):
    """One answer in a conversation; ``text`` is the answer without reasoning and function calls."""

    reasoning: str
    tool_calls: list[pb.ToolCall]


T = TypeVar("T", bound=Completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """All continuations of a request, by index.

    Args:
        prompt_logprobs: one entry for each token of the prompt except the first, if requested.
    """

    request_id: str
    model: str
    completions: list[T]
    usage: pb.Usage
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)

    @property
    def first(self) -> T:
        """Return the first continuation, the only one unless ``n`` is above 1."""
        return self.completions[0]

    @property
    def text(self) -> str:
        """Return the text of the first continuation."""
        return self.first.text


def generated(parts: Sequence[pb.GenerateResponse]) -> Reply[Completion]:
    """Return the complete reply of a Generate stream.

    Raises:
        ServiceUnavailableError: the stream ended before the request was finished.
    """
    return _reply(parts, [Completion(**_fields(own), text=_text(own)) for own in _by_index(parts)])


def answered(parts: Sequence[pb.ChatResponse]) -> Reply[Answer]:
    """Return the complete reply of a Chat stream; see ``generated``."""
    return _reply(
        parts,
        [
            Answer(
                **_fields(continuation),
                text="".join(part.content_delta for part in continuation),
                reasoning="".join(part.reasoning_delta for part in continuation),
                tool_calls=_calls(delta for part in continuation for delta in part.tool_calls),
            )
            for continuation in _by_index(parts)
        ],
    )


P = TypeVar("P", pb.GenerateResponse, pb.ChatResponse)


def _reply(parts: Sequence[P], completions: list[T]) -> Reply[T]:
    if not parts or not parts[-1].HasField("usage"):
        raise ServiceUnavailableError("the stream ended before the request was finished")
    return Reply(
        request_id=parts[-1].request_id,
        model=parts[-1].model,
        completions=completions,
        usage=parts[-1].usage,
        prompt_logprobs=[entry for part in parts for entry in part.prompt_logprobs],
    )


def _by_index(parts: Sequence[P]) -> list[list[P]]:
    indices = sorted({part.index for part in parts})
    return [[part for part in parts if part.index == index] for index in indices]


def _text(parts: Sequence[pb.GenerateResponse]) -> str:
    return "".join(part.text_delta for part in parts)


def _fields(parts: Sequence[P]) -> dict[str, Any]:
    """Return the fields that a completion and an answer have in common."""
    last = next((part for part in parts if part.finish_reason), None)
    if last is None:
        raise ServiceUnavailableError("the stream ended before the request was finished")
    kind = last.WhichOneof("stop_reason")
    return {
        "index": last.index,
        "token_ids": [token for part in parts for token in part.token_ids],
        "finish_reason": _REASONS[last.finish_reason],
        "stop_reason": getattr(last, kind) if kind else None,
        "logprobs": [entry for part in parts for entry in part.logprobs],
    }


def _calls(deltas: Iterable[pb.ToolCallDelta]) -> list[pb.ToolCall]:
    calls: dict[int, pb.ToolCall] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, pb.ToolCall())
        call.id, call.name = call.id or delta.id, call.name or delta.name
        call.arguments += delta.arguments_delta
    return [calls[index] for index in sorted(calls)]
