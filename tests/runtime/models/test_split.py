"""Models split by layers over providers and processes give the tokens of the whole model."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from family_cases import write_case
from hypothesis import given
from hypothesis import strategies as st

from carryall import LLM, SamplingParams
from carryall.errors import CarryallError, GraphError, ProviderRuntimeError, UsageError
from carryall.graph_opt.analysis.layers import LayerRange
from carryall.providers import get_provider
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.runners.process_runner import ProcessRunner
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.split import SplitPart, name_and_device, parse_split, with_device

PROMPTS = ["def add(a, b):", "class Point:\n    def __init__(self", "import os"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
needs_openvino = pytest.mark.skipif(
    get_provider("openvino").available() is not None, reason="openvino is not installed"
)


def tokens(provider: str, **options: Any) -> list[list[int]]:
    with LLM("draft", provider=provider, max_slots=4, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    return tokens("cpu")


@pytest.mark.long
@pytest.mark.parametrize(
    "split",
    [
        "cpu:0-0,cpu:1-2",
        "cpu:0-0,cpu@process:1-2",
        pytest.param("cpu:0-0,openvino:1-2", marks=needs_openvino),
        pytest.param("openvino:CPU:0-0,cpu:1-2", marks=needs_openvino),
    ],
)
def test_a_split_model_gives_the_tokens_of_the_whole(split: str, whole: list[list[int]]) -> None:
    assert tokens(split) == whole


def test_parts_keep_prefixes_and_speculation_right(whole: list[list[int]]) -> None:
    with LLM("draft", provider="cpu:0-0,cpu:1-2", max_slots=4, speculative="prompt-lookup") as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == whole


@pytest.mark.long
def test_states_of_all_parts_can_be_taken_out_and_put_back(tmp_path: Path) -> None:
    folder = write_case("falcon_h1", tmp_path / "hybrid")
    runner = load_model(str(folder), provider="cpu:0-0,cpu@process:1-1", max_slots=2).runner
    try:
        prompt = np.arange(70) % 100
        runner.forward([Row(0, prompt, 0, checkpoints=[64])])
        parts = [part.copy() for part in runner.read_kv(0, 0, 64)]
        state = [part.copy() for part in runner.read_state(0, 64)]
        expected = runner.forward([Row(0, prompt[64:65], 64, checkpoints=[64])])[0].copy()
        runner.write_kv(1, 0, 64, parts)
        with pytest.raises(ProviderRuntimeError, match="another layout"):
            runner.write_state(1, 64, state[1:])
        runner.write_state(1, 64, state)
        np.testing.assert_allclose(runner.forward([Row(1, prompt[64:65], 64)])[0], expected, atol=1e-5)
    finally:
        runner.close()


@pytest.mark.long
def test_kv_of_all_parts_can_be_taken_out_and_put_back() -> None:
    loaded = load_model("draft", provider="cpu:0-0,cpu@process:1-2", max_slots=2)
    runner = loaded.runner
    try:
        prompt = np.arange(70) % 100
        runner.forward([Row(0, prompt, 0)])
        parts = [part.copy() for part in runner.read_kv(0, 0, 64)]
        runner.write_kv(1, 0, 64, parts)
        expected = runner.forward([Row(0, prompt[64:65], 64)])[0].copy()
        np.testing.assert_allclose(runner.forward([Row(1, prompt[64:65], 64)])[0], expected, atol=1e-5)
        with pytest.raises(ProviderRuntimeError):
            runner.write_kv(1, 0, 64, [*parts, parts[0]])
    finally:
        runner.close()


@pytest.fixture
def lonely(tmp_path: Path) -> Any:
    from slot_models import save_slot_model

    runner = ProcessRunner("cpu", save_slot_model(tmp_path / "m.onnx"), RunnerConfig(max_slots=2))
    yield runner
    runner.close()


def test_a_process_that_dies_is_an_error_of_the_run(lonely: ProcessRunner) -> None:
    lonely.forward([Row(0, np.array([1, 2]), 0)])
    os.kill(lonely.pid, signal.SIGKILL)
    with pytest.raises(ProviderRuntimeError, match="exit code -9"):
        lonely.forward([Row(0, np.array([1]), 2)])


@pytest.mark.long
def test_a_fault_in_the_process_is_the_same_error_here(lonely: ProcessRunner, tmp_path: Path) -> None:
    with pytest.raises(ProviderRuntimeError, match="does not continue slot 0"):
        lonely.forward([Row(0, np.array([1]), 5)])
    lonely.forward([Row(0, np.array([1, 2]), 0)])  # and it still works
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(GraphError, match=r"bad\.onnx"):
        ProcessRunner("cpu", tmp_path / "bad.onnx", RunnerConfig())


def test_hidden_states_are_refused_where_the_graph_takes_none(tmp_path: Path) -> None:
    from slot_models import save_slot_model

    runner = get_provider("cpu").runner(save_slot_model(tmp_path / "m.onnx"), RunnerConfig(max_slots=1))
    with pytest.raises(ProviderRuntimeError, match="hidden states have"):
        runner.forward([Row(0, np.array([1]), 0, hidden_states=np.zeros((1, 8), np.float32))])
    runner.close()


def test_reading_a_split() -> None:
    assert parse_split("cpu:0-1, openvino:GPU.1:2-2,cuda@process:1:3-9", 10) == [
        SplitPart("cpu", LayerRange(0, 1)),
        SplitPart("openvino", LayerRange(2, 2), "GPU.1"),
        SplitPart("cuda", LayerRange(3, 9), "1", process=True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu", "'cpu' is not a valid part of a split"),
        ("cpu:0-1,", "'' is not a valid part of a split"),
        ("cpu:0-1,cpu:3-3", "layers 3-3 do not follow layer 1"),
        ("cpu:0-1,cpu:1-3", "layers 1-3 do not follow layer 1"),
        ("cpu:1-3", "layers 1-3 do not follow layer -1"),
        ("cpu:0-2", "names 3 layers; the model has 4"),
        ("cpu:0-4", "names 5 layers; the model has 4"),
    ],
)
def test_splits_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_split(text, 4)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("nowhere:0-0,cpu:1-2", "unknown provider 'nowhere'"),
        ("cpu:3:0-0,cpu:1-2", "'cpu' has no devices to choose from"),
        ("cpu:0-5", "the model has 3"),
        ("", "provider '' has an empty name"),
        (" , ", "provider ' , ' has an empty name"),
        ("cpu:0-2,", "provider 'cpu:0-2,' has an empty name"),
    ],
)
def test_models_that_cannot_be_split_so(split: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model("draft", provider=split)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_every_way_to_split_is_read(sizes: list[int], extra: int) -> None:
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    text = ",".join(f"cpu:{a}-{b - 1}" for a, b in itertools.pairwise(bounds))
    parts = parse_split(text, bounds[-1])
    assert [layer for part in parts for layer in range(part.layers.first, part.layers.last + 1)] == list(
        range(bounds[-1])
    )
    with pytest.raises(CarryallError):
        parse_split(text, bounds[-1] + extra)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", ("cpu", None)),
        ("cuda:1", ("cuda", "1")),
        ("openvino:GPU.1", ("openvino", "GPU.1")),
        ("cpu:0-11", ("cpu:0-11", None)),
        ("cpu:0-11,cuda:0:12-27", ("cpu:0-11,cuda:0:12-27", None)),
        ("ep:XNNPACK", ("ep:XNNPACK", None)),
    ],
)
def test_a_provider_s_name_may_end_with_a_device(text: str, expected: tuple[str, str | None]) -> None:
    assert name_and_device(text) == expected


def test_devices_are_checked() -> None:
    config = RunnerConfig(options={"compute": "bf16"})
    assert with_device(config, "cuda", "1").options == {"compute": "bf16", "device": 1}
    with pytest.raises(UsageError, match=r"device of provider 'cuda' must be an integer .* not 'x'"):
        with_device(config, "cuda", "x")
    with pytest.raises(UsageError, match="provider 'cpu' has no devices to choose from; omit '1'"):
        load_model("demo", provider="cpu:1")


def test_hidden_states_cross_the_border_of_a_process(tmp_path: Path) -> None:
    config = RunnerConfig(max_slots=2, options={"vocab_size": 16, "embedding_size": 4})
    path = tmp_path / "none.onnx"
    found: list[npt.NDArray[np.float32]] = []
    for runner in (ProcessRunner("null", path, config), get_provider("null").runner(path, config)):
        states = np.full((2, 4), np.nan, np.float32)
        rows = [Row(0, np.array([1, 2]), 0, last_hidden_states=states), Row(1, np.array([1, 3]), 0)]
        assert runner.info.embedding_size == 4
        runner.forward(rows)
        found.append(states)
        assert rows[1].last_hidden_states is None
        runner.close()
    np.testing.assert_array_equal(found[0], found[1])
    assert np.isfinite(found[0]).all()
