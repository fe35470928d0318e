"""Requests and answers in one form for all transports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ....options import shown
from ...types.outputs import FinishReason, Logprob, ToolCall
from ...types.sampling_params import SamplingParams
from .chat import Conversation

Prompt = str | list[int] | Conversation  # list[int]: token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, from any transport.

    Args:
        priority: requests with a smaller number are scheduled first.
        cache_salt: only requests with the same salt share cached prefixes.
        tenant: the requester; tenants get equal shares of the model. None uses ``cache_salt``.
        timeout: seconds after which the request is cancelled; None is no limit.
        stream_interval: engine steps per delta, except for the first and the last delta.
        lora: the name of a LoRA adapter; None is the base model.
        left_out: what the request has that is not used, for a header of the answer.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    timeout: float | None = None
    stream_interval: int = 1
    lora: str | None = None
    left_out: tuple[str, ...] = ()


def refuse_left_out(request: GenerationRequest, remedy: str = "remove it") -> GenerationRequest:
    """Return a request that is used as a whole.

    Raises:
        RequestError: a part of it is left out.
    """
    if request.left_out:
        raise RequestError(f"not supported here: {', '.join(request.left_out)}; {remedy}")
    return request


def checked_timeout(seconds: float) -> float:
    """Check a request's ``timeout`` and return it.

    Raises:
        RequestError: it is not a positive, finite number.
    """
    if not 0.0 < seconds < math.inf:
        raise RequestError(f"the timeout must be a positive number of seconds, not {shown(seconds)}")
    return seconds


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
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    prompt_seconds: float = field(default=0.0, compare=False)
    decode_seconds: float = field(default=0.0, compare=False)


@dataclass(slots=True, kw_only=True)  # not frozen: that makes each of the many objects 1 us slower to create
class Delta:
    """The new part of a continuation. The concatenation of all deltas is the whole continuation.

    The first delta of a request is empty: it comes as soon as the request is queued, so that a client sees
    the beginning of its stream and not the silence of a long prompt.
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

    @property
    def opens(self) -> bool:
        """Whether the delta only tells that the request is valid and queued; it is the first one."""
        return not (self.token_ids or self.text or self.reasoning or self.tool_calls or self.finish_reason
                    or self.usage)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One complete continuation."""

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
    """Embeddings of texts.

    Args:
        vectors: one row per text, float32 [texts, hidden_size].
        prompt_tokens: the total number of tokens of the texts.
    """

    vectors: npt.NDArray[np.float32]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Public facts of a loaded model."""

    model: str
    provider: str
    vocab_size: int
    context_length: int
    max_slots: int
    server_version: str


def by_rank(candidates: Mapping[int, Logprob], most: int | None = None) -> list[Logprob]:
    """Return one token's candidates, best first; ``most`` is the largest rank that is returned."""
    ranked = sorted(candidates.values(), key=lambda candidate: candidate.rank)
    return ranked if most is None else [candidate for candidate in ranked if candidate.rank <= most]
