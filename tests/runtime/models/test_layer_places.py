"""Layers are placed by the memory and the bandwidth of devices, which are doubles here."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall import LLM, SamplingParams
from carryall.errors import UsageError
from carryall.providers import get_provider
from carryall.providers.base import DeviceMemory, RunnerConfig
from carryall.reports import human_bytes
from carryall.runtime.models import fastest
from carryall.runtime.models.layer_places import LayerPlace, candidate, least_time, names_places
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.tasks.evaluate import load_notes

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
    [(100_000, "cpu"), (1_600_000, "openvino:0-0,cpu:1-2"), (8_000_000, "openvino")],
)
def test_a_model_runs_where_it_was_placed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int, choice: str
) -> None:
    """The model has three layers, of 0.8, 0.8 and 2.8 MB in OpenVINO."""
    device(monkeypatch, room, 1e15)
    with caplog.at_level(logging.INFO):
        assert tokens("openvino,cpu") == tokens("cpu")
    (said,) = (line for line in caplog.messages if line.startswith("layers by memory and bandwidth"))
    assert f": {choice}; the model needs " in said
    assert f"openvino has {human_bytes(int(0.9 * room))} and reads 1000000 GB/s" in said


@needs_openvino
@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "tried", "layers"),
    [(1_600_000, "openvino,cpu", "openvino:0-0,cpu:1-2"), (8_000_000, "openvino", None)],
)
def test_auto_splits_a_model_that_a_device_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int, tried: str, layers: str | None
) -> None:
    """Where the device holds the model, the provider is tried alone."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    device(monkeypatch, room, 1e15)
    monkeypatch.setattr(fastest, "provider_names", lambda: ["openvino"])
    loaded = load_model("draft", provider="auto", max_slots=2, context_length=256)
    try:
        assert loaded.choice is not None
        assert [trial.provider for trial in loaded.choice.trials] == [loaded.choice.provider] == [tried]
        assert loaded.provider == layers or tried == "openvino"
        assert (loaded.placed and loaded.placed.provider) == layers
        assert load_notes(loaded) == [str(note) for note in (loaded.choice, loaded.placed) if note]
    finally:
        loaded.close()
    assert tokens("auto") == tokens("cpu")


@needs_openvino
@pytest.mark.long
def test_auto_tries_a_device_alone_if_no_places_hold_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    device(monkeypatch, 1000, 1e15)
    monkeypatch.setattr("carryall.providers.host.machine.memory", lambda: (2**34, 1000))
    source = resolve_model("draft")
    config = RunnerConfig(max_slots=2, context_length=256)
    assert candidate(source, get_provider("openvino"), config) == "openvino"


def test_a_provider_without_a_memory_of_its_own_is_tried_alone() -> None:
    config = RunnerConfig(max_slots=2, context_length=256)
    assert candidate(resolve_model("draft"), get_provider("cpu"), config) == "cpu"


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
