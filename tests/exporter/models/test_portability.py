"""One package gives equal results in onnxruntime, OpenVINO, ONNX's reference evaluator and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engines import ENGINES, CachedDecoder, Run
from exporter_golden import (
    COLUMNS,
    LIVE_TOLERANCE,
    NEW_TOKENS,
    STORED_STEPS,
    Array,
    golden_path,
    prompt,
    transformers_answer,
)
from family_cases import (
    CASES,
    GOLDEN_OF,
    LENGTH_DEPENDENT,
    PADDING_CHANGES_TRANSFORMERS,
    write_case,
)

from carryall.contract import is_past_state
from carryall.exporter.export import export_package, families
from carryall.exporter.package import Package

TOLERANCE = 1e-4
Decoder = Callable[..., CachedDecoder]


def engine_cases() -> list[Any]:
    """All cases in onnxruntime; in the other engines one case of each model type, the rest as slow tests."""
    params, seen = [], set()
    for case in sorted(CASES):
        variant = CASES[case][0] in seen
        seen.add(CASES[case][0])
        for engine in sorted(ENGINES):
            slow = variant and engine != "onnxruntime"
            params.append(pytest.param(case, engine, marks=[pytest.mark.slow] if slow else []))
    return params


in_engines = pytest.mark.parametrize(("case", "engine"), engine_cases(), indirect=True)


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def package(case: str, tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp(case)
    return export_package(write_case(case, folder / "checkpoint"), folder / "package")


@pytest.fixture(scope="module")
def golden(case: str) -> dict[str, Array]:
    with np.load(golden_path(GOLDEN_OF.get(case, case))) as file:
        return dict(file)


@pytest.fixture(scope="module")
def decoder(package: Package) -> Decoder:
    """Open the package in an engine; each engine compiles it once."""
    runs: dict[str, Run] = {}

    def opened(engine: str, batch: int = 2) -> CachedDecoder:
        if engine == "openvino" and any(is_past_state(value.name) for value in package.load().graph.inputs):
            pytest.skip("OpenVINO 2026.4 converts these operators with carryall's extension alone")
        if engine not in runs:
            runs[engine] = ENGINES[engine](package.model_path)
        return CachedDecoder(runs[engine], package.model_path, batch)

    return opened


def test_every_family_has_a_case() -> None:
    # To an encoder's rows, in ``tests/exporter/audio`` and ``tests/exporter/vision``.
    attending = {"florence2", "vision_encoder_decoder", "whisper"}
    assert {model_type for model_type, _ in CASES.values()} == set(families()) - attending


@pytest.mark.long
def test_the_graph_is_standard_onnx(package: Package) -> None:
    onnx.checker.check_model(str(package.model_path), full_check=True)
    model = package.load()
    assert model.opset_imports == {
        "": 27 if any(is_past_state(value.name) for value in model.graph.inputs) else 23
    }
    assert {node.domain for node in model.graph.all_nodes()} == {""}


@pytest.mark.long
@in_engines
def test_greedy_continuation_equals_transformers(
    decoder: Decoder, engine: str, golden: dict[str, Array], case: str
) -> None:
    rows = slice(1 if case in PADDING_CHANGES_TRANSFORMERS else 2)  # the second row is padded
    golden = {name: value[rows] for name, value in golden.items() if name != "margin"}
    input_ids, mask = (array[rows] for array in prompt())
    net = decoder(engine, batch=len(input_ids))
    logits = net(input_ids, mask)
    difference = np.abs(logits[..., COLUMNS] - golden["prompt_logits"])
    assert difference[mask == 1].max() < TOLERANCE
    tokens, steps = [], []
    count = NEW_TOKENS if engine == "onnxruntime" else STORED_STEPS
    for _ in range(count):
        tokens.append(logits[:, -1:].argmax(axis=-1))
        logits = net(tokens[-1], np.ones_like(tokens[-1]))
        steps.append(logits[..., COLUMNS])
    step_logits = np.concatenate(steps[:STORED_STEPS], axis=1)
    np.testing.assert_allclose(step_logits, golden["step_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(np.concatenate(tokens, axis=1), golden["tokens"][:, :count])


@pytest.mark.long
@in_engines
def test_a_prompt_in_pieces_equals_the_whole(decoder: Decoder, engine: str, case: str) -> None:
    if case in LENGTH_DEPENDENT:
        pytest.skip("its rotary embedding depends on the length of the run")
    input_ids, mask = prompt()
    whole = decoder(engine)(input_ids, mask)
    net, pieces = decoder(engine), []
    for start, end in ((0, 6), (6, 9), (9, 10), (10, 14)):
        pieces.append(net(input_ids[:, start:end], mask[:, start:end]))
    difference = np.abs(np.concatenate(pieces, axis=1) - whole)
    assert difference[mask == 1].max() < TOLERANCE


@pytest.mark.long
@in_engines
def test_padding_changes_nothing(decoder: Decoder, engine: str) -> None:
    input_ids, mask = prompt()
    padded = decoder(engine)(input_ids, mask)[1:, mask[1] == 1]
    alone = input_ids[1:, mask[1] == 1]
    net = decoder(engine, batch=1)
    np.testing.assert_allclose(net(alone, np.ones_like(alone)), padded, rtol=0, atol=TOLERANCE)


@pytest.mark.long
def test_golden_files_equal_transformers(case: str, golden: dict[str, Array], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if case in GOLDEN_OF:
        pytest.skip("has no golden file of its own")
    answer = transformers_answer(write_case(case, tmp_path))
    np.testing.assert_array_equal(answer["tokens"], golden["tokens"])
    for name in ("prompt_logits", "step_logits"):
        np.testing.assert_allclose(answer[name], golden[name], rtol=0, atol=LIVE_TOLERANCE)
