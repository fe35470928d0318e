"""Deltas concatenate to the whole, however the states are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError, RequestCancelled
from carryall.runtime.service.core.deltas import DeltaTracker, collect
from carryall.runtime.service.core.messages import Delta
from carryall.runtime.types.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)

TEXT = "añ 漢字🙂 end"


def state(
    tokens: int, characters: int, finish: FinishReason | None = None, error: str | None = None
) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text=TEXT[:characters],
        token_ids=list(range(tokens)),
        finish_reason=finish,
        logprobs=[{n: Logprob(n, -1.0, 1, "t")} for n in range(tokens)],
        reasoning_content=TEXT[:characters] or None,
        tool_calls=[ToolCall("id", "f", "{}")] * characters,
    )
    metrics = RequestMetrics(arrival=0.0, cached_tokens=2)
    prompt: list[dict[int, Logprob] | None] = [None, *({n: Logprob(n, -1.0, 1, "t")} for n in (2, 3))]
    return RequestOutput("r", None, [1, 2, 3], [completion], finish is not None, metrics, error, prompt)


async def stream(deltas: list[Delta]) -> AsyncGenerator[Delta, None]:
    for delta in deltas:
        yield delta


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, len(TEXT)))))
def test_deltas_concatenate_to_the_whole(cuts: list[tuple[int, int]]) -> None:
    tokens, characters = (sorted(values) for values in ([cut[0] for cut in cuts], [cut[1] for cut in cuts]))
    states = [state(*cut) for cut in zip(tokens, characters, strict=True)]
    tracker = DeltaTracker()
    deltas = [
        delta for output in [*states, state(20, len(TEXT), "stop")] for delta in tracker.advance(output)
    ]
    whole = asyncio.run(collect(stream(deltas)))
    (choice,) = whole.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (TEXT, list(range(20)), "stop")
    assert (choice.reasoning, [call.name for call in choice.tool_calls]) == (TEXT, ["f"] * len(TEXT))
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    assert len(whole.prompt_logprobs) == (3 if choice.token_ids else 0)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.cached_tokens) == (3, 20, 2)
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_state_without_news_gives_no_delta() -> None:
    tracker = DeltaTracker()
    assert len(list(tracker.advance(state(1, 0)))) == 1
    assert list(tracker.advance(state(1, 0))) == []


def test_a_failed_request_raises() -> None:
    with pytest.raises(ProviderRuntimeError, match="out of memory"):
        list(DeltaTracker().advance(state(1, 1, "error", "out of memory")))


@pytest.mark.parametrize("finish", [None, "cancelled"])
def test_an_unfinished_stream_is_no_result(finish: FinishReason | None) -> None:
    deltas = list(DeltaTracker().advance(state(1, 1, finish)))
    with pytest.raises(RequestCancelled):
        asyncio.run(collect(stream(deltas)))
