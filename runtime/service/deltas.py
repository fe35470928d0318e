"""Growing outputs cut into what is new in each, and put together again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ...errors import ProviderRuntimeError, RequestCancelled
from ..types.outputs import CompletionOutput, RequestOutput
from .messages import Choice, Delta, Generation, Usage


@dataclass(slots=True)
class _Sent:
    """How much of one continuation has been sent."""

    characters: int = 0
    tokens: int = 0
    logprobs: int = 0
    reasoning: int = 0
    tool_calls: int = 0
    prompt_logprobs: int = 0
    finished: bool = False


class DeltaTracker:
    """Turns the successive states of one request into deltas."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def advance(self, output: RequestOutput) -> Iterator[Delta]:
        """Yield what each continuation gained since the state before.

        Raises:
            ProviderRuntimeError: the request failed.
        """
        if output.error is not None:
            raise ProviderRuntimeError(output.error)
        for position, completion in enumerate(output.outputs, start=1):
            last = output.finished and position == len(output.outputs)
            delta = self._delta(output, completion, _usage(output) if last else None)
            if delta is not None:
                yield delta

    def _delta(
        self, output: RequestOutput, completion: CompletionOutput, usage: Usage | None
    ) -> Delta | None:
        sent = self._sent.setdefault(completion.index, _Sent())
        prompt = (output.prompt_logprobs or []) if completion.index == 0 else []
        # They are sent at once, and are complete when the first token is there.
        prompt = prompt[sent.prompt_logprobs :] if completion.token_ids or completion.finish_reason else []
        delta = Delta(
            request_id=output.request_id,
            index=completion.index,
            text=completion.text[sent.characters :],
            token_ids=completion.token_ids[sent.tokens :],
            logprobs=(completion.logprobs or [])[sent.logprobs :],
            reasoning=(completion.reasoning_content or "")[sent.reasoning :],
            tool_calls=completion.tool_calls[sent.tool_calls :],
            prompt_logprobs=prompt,
            finish_reason=None if sent.finished else completion.finish_reason,
            stop_reason=None if sent.finished else completion.stop_reason,
            usage=usage,
        )
        sent.characters += len(delta.text)
        sent.tokens += len(delta.token_ids)
        sent.logprobs += len(delta.logprobs)
        sent.reasoning += len(delta.reasoning)
        sent.tool_calls += len(delta.tool_calls)
        sent.prompt_logprobs += len(delta.prompt_logprobs)
        sent.finished = completion.finish_reason is not None
        news = delta.text or delta.token_ids or delta.reasoning or delta.tool_calls
        return delta if news or delta.finish_reason or delta.usage else None


def _usage(output: RequestOutput) -> Usage:
    return Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cached_tokens=output.metrics.cached_tokens if output.metrics else 0,
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
        raise RequestCancelled("the request was cancelled before it was finished")
    indices = sorted({part.index for part in parts})
    return Generation(
        request_id=last.request_id,
        choices=[_choice(index, [part for part in parts if part.index == index]) for index in indices],
        usage=last.usage,
        prompt_logprobs=[entry for part in parts for entry in part.prompt_logprobs],
    )


def _choice(index: int, parts: Sequence[Delta]) -> Choice:
    end = next((part for part in parts if part.finish_reason is not None), None)
    if end is None or end.finish_reason not in ("stop", "length"):
        late = end is not None and end.stop_reason == "deadline"
        raise RequestCancelled(
            "the request's timeout passed before it was finished; allow it more time, or fewer tokens"
            if late
            else "the request was cancelled before it was finished"
        )
    return Choice(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs],
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
    )
