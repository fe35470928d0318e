"""Requests and answers in one form for all transports."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from ....errors import RequestCancelled, RequestError
from ....options import shown
from ....records import dataclass
from ...text.infill import Infill
from ...types.outputs import Delta as Delta
from ...types.outputs import FinishReason, Logprob, summed
from ...types.outputs import Usage as Usage
from ...types.sampling_params import SamplingParams
from .chat import Conversation

_CANCELLED = "the request was cancelled before it was finished"

Prompt = str | list[int] | Conversation | Infill  # list[int]: token ids


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
        pin_seconds: how long the KV of the request is evicted after that of others.
        return_progress: tell how much of the prompt is computed while it is.
        return_token_ids: tell the tokens of the prompt and of the answer.
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
    pin_seconds: float = 0.0
    return_progress: bool = False
    return_token_ids: bool = False

    @property
    def has_schemas(self) -> bool:
        """Whether JSON schemas may hold the answer."""
        called = isinstance(self.prompt, Conversation) and bool(self.prompt.called)
        return called or self.params.structured_output is not None


def with_gap(request: GenerationRequest, tokens: list[int], ends: Sequence[int]) -> GenerationRequest:
    """Return a request for the text of a gap, from what ``infill_tokens`` gives."""
    params = dataclasses.replace(request.params, stop_token_ids=(*request.params.stop_token_ids, *ends))
    return dataclasses.replace(request, prompt=tokens, params=params)


def with_schema_read(request: GenerationRequest) -> GenerationRequest:
    """Return a request whose ``left_out`` also names the keywords of its schemas that no grammar holds.

    It takes milliseconds for each 10 kB of a schema: call it in a thread where others wait.

    Raises:
        InvalidSamplingError: the schema is not valid.
    """
    structured = request.params.structured_output
    texts = [] if structured is None or structured.json_schema is None else [structured.key[1]]
    if isinstance(request.prompt, Conversation) and request.prompt.called:
        functions = [tool["function"] for tool in request.prompt.tools]
        called = [function for function in functions if function["name"] in request.prompt.called]
        texts += [json.dumps(function["parameters"]) for function in called if function.get("parameters")]
    if not texts:
        return request
    from ...text.json_schema import held_schema  # loads the library for grammars

    loosened = dict.fromkeys(name for text in texts for name in held_schema(text).loosened)
    names = [f"schema.{name}" for name in loosened]
    return dataclasses.replace(request, left_out=(*request.left_out, *names)) if names else request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All continuations of a request.

    Args:
        request_id: of the request.
        choices: each continuation as one delta, by index.
        usage: the token counts of all together.
        prompt_logprobs: one entry per token of the prompt, if requested.
        prompt_token_ids: the tokens of the prompt, if requested.
    """

    request_id: str
    choices: list[Delta]
    usage: Usage
    prompt_logprobs: Sequence[dict[int, Logprob] | None] = ()
    prompt_token_ids: Sequence[int] = ()

    @property
    def reason(self) -> FinishReason:
        """Why the first continuation ended."""
        return self.choices[0].finish_reason or "stop"

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Generation:
        """Return the sum of all deltas of a request.

        Raises:
            RequestCancelled: the deltas ended before the request did.
        """
        parts: dict[int, list[Delta]] = {}
        usage = None
        for delta in deltas:
            refuse_cancelled(delta)
            parts.setdefault(delta.index, []).append(delta)
            usage = delta.usage
        choices = [summed(parts[index]) for index in sorted(parts)]
        if usage is None or not all(choice.finish_reason for choice in choices):
            raise RequestCancelled(_CANCELLED)
        return cls(
            request_id=choices[0].request_id,
            choices=choices,
            usage=usage,
            prompt_logprobs=choices[0].prompt_logprobs,
            prompt_token_ids=choices[0].prompt_token_ids,
        )


def refuse_cancelled(delta: Delta) -> None:
    """Check that a delta does not end an answer before it is finished; HTTP's APIs have no reason for that.

    Raises:
        RequestCancelled: the request was cancelled, or its timeout has passed.
    """
    if delta.finish_reason in (None, "stop", "length"):
        return
    raise RequestCancelled(
        "the request's timeout passed before it was finished; allow it more time, or fewer tokens"
        if delta.stop_reason == "deadline"
        else _CANCELLED
    )


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
    """Public facts of a loaded model; ``reads_images`` tells whether it sees pictures as it was loaded."""

    model: str
    provider: str
    vocab_size: int
    context_length: int
    max_slots: int
    server_version: str
    reads_images: bool = False


def by_rank(candidates: Mapping[int, Logprob], most: int | None = None) -> list[Logprob]:
    """Return one token's candidates, best first; ``most`` is the largest rank that is returned."""
    ranked = sorted(candidates.values(), key=lambda candidate: candidate.rank)
    return ranked if most is None else [candidate for candidate in ranked if candidate.rank <= most]
