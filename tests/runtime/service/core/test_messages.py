"""The deltas of a request concatenate to the whole answer; an unfinished stream is no answer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import RequestCancelled
from carryall.runtime.service.core.messages import Generation
from carryall.runtime.types.outputs import Delta, FinishReason, ToolCall, Usage

TEXT = "añ 漢字🙂 end"


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(TEXT))))
def test_deltas_concatenate_to_the_whole(cuts: list[int]) -> None:
    places = sorted({0, len(TEXT), *cuts})
    deltas = [
        Delta(
            request_id="r",
            index=0,
            text=TEXT[start:stop],
            reasoning=TEXT[start:stop],
            token_ids=range(start, stop),
            tool_calls=[ToolCall("" if start else "id", "" if start else "f", TEXT[start:stop])],
        )
        for start, stop in pairwise(places)
    ]
    deltas[-1].finish_reason, deltas[-1].usage = "stop", Usage(3, len(TEXT), 2)
    whole = Generation.of(deltas)
    (choice,) = whole.choices
    assert (choice.text, choice.reasoning, choice.finish_reason) == (TEXT, TEXT, "stop")
    assert list(choice.token_ids) == list(range(len(TEXT)))
    assert choice.tool_calls == [ToolCall("id", "f", TEXT)]
    assert whole.usage == Usage(3, len(TEXT), 2)


@pytest.mark.parametrize("finish", [None, "cancelled"])
def test_an_unfinished_stream_is_no_result(finish: FinishReason | None) -> None:
    usage = None if finish is None else Usage(1, 1, 0)
    delta = Delta(request_id="r", index=0, text="a", token_ids=[1], finish_reason=finish, usage=usage)
    with pytest.raises(RequestCancelled):
        Generation.of([delta])
