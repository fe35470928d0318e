"""Concatenate deltas to whole answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ....errors import RequestCancelled
from ...types.outputs import Delta, merged_calls
from .messages import Choice, Generation

_CANCELLED = "the request was cancelled before it was finished"


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
        prompt_token_ids=next((part.prompt_token_ids for part in parts if part.prompt_token_ids), ()),
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
