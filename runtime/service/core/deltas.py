"""Split growing outputs into deltas, and concatenate deltas again."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from ....errors import RequestCancelled
from ...types.outputs import CompletionOutput, RequestMetrics, RequestOutput, merged_calls
from .messages import Choice, Delta, Generation, Usage

_CANCELLED = "the request was cancelled before it was finished"


class DeltaTracker:
    """Turns the successive states of one request into deltas. The cost is linear in the new tokens."""

    def __init__(self) -> None:
        self._last: dict[int, CompletionOutput] = {}
        self._prompt_sent = False
        self._reasoning_tokens = 0

    def advance(self, output: RequestOutput) -> Iterator[Delta]:
        """Yield what each continuation gained since the previous state.

        Raises:
            InvalidSamplingError, ProviderRuntimeError: the request failed; see ``RequestOutput.check``.
        """
        output.check()
        for position, completion in enumerate(output.outputs, start=1):
            last = output.finished and position == len(output.outputs)
            delta = self._delta(output, completion, last=last)
            if delta is not None:
                yield delta

    def _delta(self, output: RequestOutput, completion: CompletionOutput, *, last: bool) -> Delta | None:
        before = self._last.get(completion.index)
        self._last[completion.index] = completion
        new = completion.since(before)
        self._reasoning_tokens += new.reasoning_tokens
        finished = before is not None and before.finish_reason is not None
        delta = Delta(
            request_id=output.request_id,
            index=completion.index,
            text=new.text,
            token_ids=new.token_ids,
            logprobs=new.logprobs or [],
            reasoning=new.reasoning_content or "",
            tool_calls=new.tool_calls,
            finish_reason=None if finished else completion.finish_reason,
            stop_reason=None if finished else completion.stop_reason,
            usage=_usage(output, self._reasoning_tokens) if last else None,
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.metrics.cached_tokens if output.metrics else 0,
            reasoning_tokens=new.reasoning_tokens,
        )
        if completion.index == 0 and not self._prompt_sent and (new.token_ids or completion.finish_reason):
            # The prompt's logprobs are complete with the first token. They are sent once.
            self._prompt_sent = True
            delta = dataclasses.replace(delta, prompt_logprobs=output.prompt_logprobs or [])
        news = delta.text or delta.token_ids or delta.reasoning or delta.tool_calls
        return delta if news or delta.finish_reason or delta.usage else None


def _usage(output: RequestOutput, reasoning_tokens: int) -> Usage:
    times = output.metrics or RequestMetrics(0.0)
    first = times.first_token
    return Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cached_tokens=times.cached_tokens,
        reasoning_tokens=reasoning_tokens,
        prompt_seconds=first - times.first_scheduled if first and times.first_scheduled else 0.0,
        decode_seconds=times.finished - first if first and times.finished else 0.0,
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


async def collect(deltas: AsyncGenerator[Delta, None]) -> Generation:
    """Return the concatenation of a request's deltas, for each of its continuations.

    Raises:
        RequestCancelled: the stream ended before the request did.
    """
    async with aclosing(deltas):
        parts = [delta async for delta in deltas]
    last = parts[-1] if parts else None
    if last is None or last.usage is None:
        raise RequestCancelled(_CANCELLED)
    indices = sorted({part.index for part in parts})
    return Generation(
        request_id=last.request_id,
        choices=[_choice(index, [part for part in parts if part.index == index]) for index in indices],
        usage=last.usage,
        prompt_logprobs=[entry for part in parts for entry in part.prompt_logprobs],
    )


def _choice(index: int, parts: Sequence[Delta]) -> Choice:
    end = next((part for part in parts if part.finish_reason is not None), None)
    if end is None or end.finish_reason is None:
        raise RequestCancelled(_CANCELLED)
    refuse_cancelled(end)
    return Choice(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs],
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=merged_calls(call for part in parts for call in part.tool_calls),
    )
