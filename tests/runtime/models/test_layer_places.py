"""Layers are placed by the memory and the bandwidth of devices, which are doubles here."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall import LLM, SamplingParams
from carryall.errors import UsageError
from carryall.providers import get_provider
from carryall.providers.base import DeviceMemory
from carryall.runtime.models.layer_places import LayerPlace, least_time, names_places

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["def add(a, b):", "import os"]
needs_openvino = pytest.mark.skipif(
    get_provider("openvino").available() is not None, reason="openvino is not installed"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cuda,cpu", True),
        ("cuda:0, cuda:1,cpu", True),
        ("cpu", False),
        ("cuda:1", False),
        ("auto", False),
        ("cpu:0-3,cuda:4-7", False),
        ("cpu:0-3,cuda", False),
        ("ep:/opt/library,v2.so", False),
    ],
)
def test_places_are_told_from_ranges(text: str, names: bool) -> None:
    assert names_places(text) == names


def place(room: int, bandwidth: float, weights: list[int], kv: int = 1, fixed: int = 2) -> LayerPlace:
    return LayerPlace("any", room, bandwidth, weights, kv, fixed)


def test_the_faster_place_has_as_many_layers_as_it_has_room_for() -> None:
    weights = [10] * 6
    fast, slow = place(36, 100.0, weights), place(1000, 10.0, weights)
    assert least_time([fast, slow], [True] * 6) == [0, 3, 6]
    assert least_time([slow, fast], [True] * 6) == [0, 3, 6]
    assert least_time([place(1000, 100.0, weights), slow], [True] * 6) == [0, 6, 6]
    assert least_time([fast, fast], [True] * 6) == [0, 3, 6]
    assert least_time([fast, place(35, 100.0, weights)], [True] * 6) == [0, 3, 6]
    assert least_time([fast, place(34, 100.0, weights)], [True] * 6) is None


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[LayerPlace], list[bool]]:
    layers = draw(st.integers(1, 6))
    cached = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    sizes = st.lists(st.integers(1, 30), min_size=layers, max_size=layers)
    each = st.builds(place, st.integers(0, 120), st.integers(1, 9).map(float), sizes)
    return draw(st.lists(each, min_size=1, max_size=3)), cached


@given(machines())
def test_no_other_cut_takes_less_time(drawn: tuple[list[LayerPlace], list[bool]]) -> None:
    places, cached = drawn
    total = len(cached)

    def seconds(cuts: tuple[int, ...]) -> float:
        ranges = list(itertools.pairwise(cuts))
        if any(begin < end and not any(cached[begin:end]) for begin, end in ranges):
            return math.inf
        return sum(place.seconds(begin, end) for place, (begin, end) in zip(places, ranges, strict=True))

    inner = itertools.combinations_with_replacement(range(total + 1), len(places) - 1)
    least = min(seconds((0, *cuts, total)) for cuts in inner)
    cuts = least_time(places, cached)
    assert (cuts is None) == (least == math.inf)
    if cuts is not None:
        assert seconds(tuple(cuts)) == pytest.approx(least)


def device(monkeypatch: pytest.MonkeyPatch, total: int, bandwidth: float) -> None:
    """Let OpenVINO's device have a memory of its own."""
    openvino = type(get_provider("openvino"))
    monkeypatch.setattr(openvino, "device_memory", lambda *_: DeviceMemory("openvino:0", 1000, total + 1000))
    monkeypatch.setattr(openvino, "memory_bandwidth", lambda *_: bandwidth)


def tokens(provider: str, **options: Any) -> list[list[int]]:
    with LLM("draft", provider=provider, max_slots=2, context_length=256, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@needs_openvino
@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "choice"),
    [(100_000, "cpu:0-2"), (1_600_000, "openvino:0-0,cpu:1-2"), (8_000_000, "openvino:0-2")],
)
def test_a_model_runs_where_it_was_placed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int, choice: str
) -> None:
    """The model has three layers, of 0.8, 0.8 and 2.8 MB in OpenVINO."""
    device(monkeypatch, room, 1e15)
    with caplog.at_level(logging.INFO):
        assert tokens("openvino,cpu") == tokens("cpu")
    assert f"layers by memory and bandwidth: {choice}" in caplog.messages


@needs_openvino
@pytest.mark.long
def test_places_of_one_memory_and_too_little_of_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="share the memory of this machine"):
        tokens("openvino,cpu")
    device(monkeypatch, 1000, 1e15)
    monkeypatch.setattr("carryall.providers.host.machine.memory", lambda: (2**34, 1000))
    monkeypatch.setattr("carryall.runtime.models.loading.check_memory", lambda *_: None)
    with pytest.raises(UsageError, match=r"'openvino,cpu' cannot hold draft.*Lower --context-length"):
        tokens("openvino,cpu")


@needs_openvino
@pytest.mark.long
def test_a_bandwidth_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, 1000, 1e15)
    monkeypatch.setattr(type(get_provider("openvino")), "memory_bandwidth", lambda *_: None)
    with pytest.raises(UsageError, match="bandwidth of openvino is not known; name the layers"):
        tokens("openvino,cpu")
