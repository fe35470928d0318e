"""What every transport turns its requests into, and its answers out of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ...types.outputs import FinishReason, Logprob, ToolCall
from ...types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, as the model's chat template takes them: each with a `role` and a `content`.

    Args:
        tools: JSON schemas of functions that the model may call.
        variables: whatever else the template understands.
        must_call: the answer consists of tool calls, held to that by ``params.structured_output``; its text
            is theirs as JSON, see ``tool_choice``.
        parallel_calls: whether an answer may hold more than one tool call.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    must_call: bool = False
    parallel_calls: bool = True


Prompt = str | list[int] | Conversation  # list[int]: token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, whatever it came by.

    Args:
        priority: a smaller number is served first.
        cache_salt: only requests of the same salt, a tenant's say, share cached prefixes.
        tenant: who asks; the model is shared out fairly between tenants. None takes the salt.
        timeout: seconds after which the request ends as cancelled, however far it is; None is no limit.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    timeout: float | None = None


def checked_timeout(seconds: float) -> float:
    """Return a request's ``timeout``.

    Raises:
        RequestError: it is not a positive, finite number.
    """
    if not 0.0 < seconds < math.inf:
        raise RequestError(f"the timeout must be a positive number of seconds, not {seconds!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a continuation gained since the last delta; all of them concatenated are the whole."""

    request_id: str
    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[dict[int, Logprob]] = ()  # one a token, if asked for
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()  # each is whole
    prompt_logprobs: Sequence[dict[int, Logprob] | None] = ()  # all of them at once, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None  # in the last delta of the request
    prompt_tokens: int = 0  # how many tokens the prompt has


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The whole of one continuation."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: FinishReason
    stop_reason: str | int | None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All continuations of a request, by index."""

    request_id: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of texts.

    Args:
        vectors: one row a text, float32 [texts, hidden_size].
        prompt_tokens: how many tokens the texts have in all.
    """

    vectors: npt.NDArray[np.float32]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model, as clients see it."""

    model: str
    provider: str
    vocab_size: int
    context_length: int
    max_slots: int
    server_version: str


def by_rank(candidates: Mapping[int, Logprob], most: int | None = None) -> list[Logprob]:
    """Return one token's candidates, best first; ``most`` leaves out a chosen token of a lower rank."""
    ranked = sorted(candidates.values(), key=lambda candidate: candidate.rank)
    return ranked if most is None else [candidate for candidate in ranked if candidate.rank <= most]
