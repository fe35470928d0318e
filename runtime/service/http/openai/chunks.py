"""Convert deltas to the chunks of OpenAI's streamed responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...core.answer_parts import AnswerParts, CallDelta, TextPart
from ...core.messages import Delta, GenerationRequest, Usage
from .chat import finish_reason
from .completions import CompletionAsk, Echo
from .reading import Json
from .stream_options import StreamOptions
from .writing import chat_logprobs, completion_logprobs, usage_json


class _Chunks:
    """The base class of both kinds of streams."""

    def __init__(self, prefix: str, kind: str, model: str, options: StreamOptions) -> None:
        self._prefix, self._options = prefix, options
        self._frame: Json = {"object": kind, "created": int(time.time()), "model": model}
        self._id = ""
        self._prompt_tokens: dict[int, int] = {}  # by index of the prompt
        self._tokens = 0
        self._usage: dict[int, Usage] = {}
        self._begun = time.monotonic()

    def progress(self, delta: Delta) -> Json:
        """Return the chunk that tells how far a prompt is computed, as llama.cpp's server does."""
        return self.chunk([]) | {
            "prompt_progress": {
                "total": delta.prompt_tokens,
                "cache": delta.cached_tokens,
                "processed": delta.computed_prompt_tokens,
                "time_ms": round(1000 * (time.monotonic() - self._begun)),
            }
        }

    def note(self, delta: Delta, position: int = 0) -> None:
        """Add the tokens of a delta to the counts."""
        self._id = self._id or f"{self._prefix}-{delta.request_id}"
        self._prompt_tokens[position] = delta.prompt_tokens
        self._tokens += len(delta.token_ids)
        if delta.usage is not None:
            self._usage[position] = delta.usage

    def chunk(self, choices: list[Json]) -> Json:
        """Return a chunk. The stream options make ``usage`` absent, null, or the counts so far."""
        chunk = {"id": self._id, **self._frame, "choices": choices}
        if self._options.continuous_usage:
            chunk["usage"] = usage_json(self._so_far())
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def last(self) -> Iterator[Json]:
        """Yield the final chunk with ``usage`` and no choices, if ``include_usage`` is set."""
        if self._options.include_usage:
            yield {"id": self._id, **self._frame, "choices": [], "usage": usage_json(self._so_far())}

    def _so_far(self) -> Usage:
        return Usage(
            prompt_tokens=sum(self._prompt_tokens.values()),
            completion_tokens=self._tokens,
            cached_tokens=sum(usage.cached_tokens for usage in self._usage.values()),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in self._usage.values()),
            pictures=tuple(picture for usage in self._usage.values() for picture in usage.pictures),
        )


class ChatChunks(_Chunks):
    """The chunks of a chat completion.

    Args:
        request: the request to answer.
        model: the name of the model.
        options: the stream options.
    """

    def __init__(self, request: GenerationRequest, model: str, options: StreamOptions) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", model, options)
        self._wanted = request.params.logprobs
        self._request = request
        self._parts: dict[int, AnswerParts] = {}  # by index

    def of(self, delta: Delta) -> Iterator[Json]:
        """Yield the chunks of a delta."""
        self.note(delta)
        if delta.computed_prompt_tokens is not None:
            yield self.progress(delta)
            return
        tells = self._request.return_token_ids
        parts = self._parts.get(delta.index)
        if parts is None:
            parts = self._parts[delta.index] = AnswerParts(self._request)
            first = self.chunk([_choice(delta.index, {"role": "assistant", "content": ""})])
            yield first | ({"prompt_token_ids": list(delta.prompt_token_ids)} if tells else {})
        contents = [_content(part) for part in parts.of(delta)]
        logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._wanted if delta.logprobs else None)
        token_ids: Json = {"token_ids": list(delta.token_ids)} if tells and delta.token_ids else {}
        if (logprobs is not None or token_ids) and not contents:
            contents = [{"content": ""}]
        for content in contents:
            yield self.chunk([_choice(delta.index, content, logprobs) | token_ids])
            logprobs, token_ids = None, {}  # they cover all tokens of the delta, so send them once
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, parts.calls > 0)
            yield self.chunk([_choice(delta.index, {}, None, reason)])


def _content(part: TextPart | CallDelta) -> Json:
    if isinstance(part, CallDelta):
        return {"tool_calls": [_call_json(part)]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


def _choice(index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _call_json(piece: CallDelta) -> Json:
    function: Json = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }


class CompletionChunks(_Chunks):
    """The chunks of completions.

    Args:
        ask: the request body to answer.
        prompts: one entry per prompt with ``echo``, else empty.
        model: the name of the model.
    """

    def __init__(self, ask: CompletionAsk, prompts: Sequence[Echo], model: str) -> None:
        super().__init__("cmpl", "text_completion", model, ask.stream)
        self._ask, self._prompts = ask, prompts
        self._lengths: dict[int, int] = {}  # number of characters sent, by choice index

    def of(self, position: int, delta: Delta) -> Iterator[Json]:
        """Yield the chunks of a delta of the prompt at ``position``."""
        request = self._ask.requests[position]
        self.note(delta, position)
        if delta.computed_prompt_tokens is not None:
            yield self.progress(delta)
            return
        if delta.opens:
            if request.return_token_ids:
                first = {"index": position * request.params.n, "text": "", "logprobs": None,
                         "finish_reason": None, "prompt_token_ids": list(delta.prompt_token_ids)}  # fmt: skip
                yield self.chunk([first])
            return
        if self._ask.no_tokens:
            self._tokens = 0
        index = position * request.params.n + delta.index
        if self._ask.echo and index not in self._lengths:
            yield self.chunk(
                [self._echo(index, self._prompts[position].with_logprobs(delta.prompt_logprobs))]
            )
        text = "" if self._ask.no_tokens else delta.text
        logprobs: Any = None
        if delta.logprobs and not self._ask.no_tokens:
            offset = self._lengths.get(index, 0)
            logprobs = completion_logprobs(delta.token_ids, delta.logprobs, offset=offset)
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        tokens = {"token_ids": list(delta.token_ids)} if request.return_token_ids else {}
        if text or logprobs or tokens or delta.finish_reason:
            reason = "length" if delta.finish_reason and self._ask.no_tokens else delta.finish_reason
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            yield self.chunk([choice | tokens])

    def _echo(self, index: int, echo: Echo) -> Json:
        self._lengths[index] = len(echo.text)
        logprobs = completion_logprobs(echo.token_ids, echo.logprobs, echo.first) if echo.logprobs else None
        return {"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None}
