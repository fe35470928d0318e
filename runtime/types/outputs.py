"""What a request gives back; shaped like vLLM's, since that is what people know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

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


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation. In a chat, ``text`` is the answer without reasoning and tool calls."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while still running
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token, by token id
    cumulative_logprob: float | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


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
class RequestOutput:
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
