"""Growing outputs cut into what is new in each, and put together again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from ..errors import ProviderRuntimeError, RequestCancelled
from ..outputs import CompletionOutput, RequestOutput
from .messages import Delta, Generation, Usage


@dataclass(slots=True)
class _Sent:
    """How much of one continuation has been sent."""

    characters: int = 0
    tokens: int = 0
    logprobs: int = 0
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
        delta = Delta(
            request_id=output.request_id,
            index=completion.index,
            text=completion.text[sent.characters :],
            token_ids=completion.token_ids[sent.tokens :],
            logprobs=(completion.logprobs or [])[sent.logprobs :],
            finish_reason=None if sent.finished else completion.finish_reason,
            stop_reason=None if sent.finished else completion.stop_reason,
            usage=usage,
        )
        sent.characters += len(delta.text)
        sent.tokens += len(delta.token_ids)
        sent.logprobs += len(delta.logprobs)
        sent.finished = completion.finish_reason is not None
        news = delta.text or delta.token_ids or delta.finish_reason or delta.usage
        return delta if news else None


def _usage(output: RequestOutput) -> Usage:
    return Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        cached_tokens=output.metrics.cached_tokens if output.metrics else 0,
    )


async def collect(deltas: AsyncGenerator[Delta, None]) -> Generation:
    """Return the concatenation of a request's deltas.

    Raises:
        RequestCancelled: the stream ended before the request did.
    """
    async with aclosing(deltas):
        parts = [delta async for delta in deltas]
    last = parts[-1] if parts else None
    if last is None or last.usage is None or last.finish_reason not in ("stop", "length"):
        raise RequestCancelled("the request was cancelled before it was finished")
    return Generation(
        request_id=last.request_id,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
    )
